"""Damage of files: always a change, and the same for one seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from benchmarks.attack import damage

TEXT = b">one\nMKT\n>two\nGSG\n"
FILES = {
    "a.safetensors": save({"x": torch.ones(4), "y": torch.ones(2)}, metadata={"layers": "12", "name": "turbo3"}),
    "a.json": json.dumps({"layers": 12, "names": ["a"], "token_dropout": True}).encode(),
    "a.fasta": TEXT,
    "a.h5": bytes(range(256)),
}


@pytest.mark.parametrize("name", FILES)
def test_every_seed_changes_the_file_and_is_repeatable(tmp_path: Path, name: str) -> None:
    path, said, damaged = tmp_path / name, set(), set()
    for seed in range(60):
        found = []
        for _ in range(2):
            path.write_bytes(FILES[name])
            said.add(damage.damage(random.Random(seed), [path]))
            found.append(path.read_bytes())
        assert found[0] == found[1] != FILES[name]
        damaged.add(found[0])
    assert len(said) >= 4 and len(damaged) > 40


def test_files_are_exchanged(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.json"]
    exchanged = 0
    for seed in range(40):
        for path in paths:
            path.write_bytes(path.name.encode() if path.suffix == ".pt" else b'{"a": 1}')
        if "exchanged" in damage.damage(random.Random(seed), paths):
            assert [path.read_bytes() for path in paths] == [b"b.pt", b"a.pt", b'{"a": 1}']
            exchanged += 1
    assert 0 < exchanged < 40


def test_a_changed_header_is_as_long_as_it_says() -> None:
    for seed in range(40):
        changed = damage.change_header(random.Random(seed), FILES["a.safetensors"])
        length = int.from_bytes(changed[:8], "little")
        header = json.loads(changed[8 : 8 + length])
        assert changed[8 + length :] == torch.ones(6).numpy().tobytes()
        assert header != json.loads(FILES["a.safetensors"][8:-24])


def test_damaged_links_leave_their_targets(tmp_path: Path) -> None:
    (tmp_path / "whole.txt").write_bytes(TEXT)
    (tmp_path / "link.txt").symlink_to(tmp_path / "whole.txt")
    damage.damage(random.Random(0), [tmp_path / "link.txt"])
    assert (tmp_path / "whole.txt").read_bytes() == TEXT != (tmp_path / "link.txt").read_bytes()
