"""A command that is given twice writes the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest


def content(path: Path) -> dict[str, bytes]:
    """The files of a path by name, without the lock, which says who holds it."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file() and one.name != ".lock"]
    return {str(one.relative_to(path)): one.read_bytes() for one in files}


@pytest.mark.parametrize(
    ("command", "out", "options"),
    [
        ("embed", "out", ["--format", "pt"]),
        ("embed", "out", ["--format", "safetensors", "--include", "mean", "per_tok"]),
        ("embed", "out.h5", []),
        ("embed", "out.parquet", ["--include", "mean"]),
        ("store", "out", ["--preset", "exact"]),
        ("calibrate", "out.safetensors", []),
    ],
)
def test_the_same_run_gives_the_same_bytes(
    esm: Callable[..., object], tmp_path: Path, tiny_folder: Path, command: str, out: str, options: list[str]
) -> None:
    draw, fasta = random.Random(0), tmp_path / "proteins.fasta"
    fasta.write_text("".join(f">p{n}\n{''.join(draw.choices('ACDEFGHIKLMNPQRSTVWY', k=60))}\n" for n in range(6)))
    found = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / out
        named = ["--out", path] if command == "calibrate" else [path]
        assert esm(command, fasta, *named, "--model", tiny_folder, *options).code == 0
        found.append(content(path))
    assert found[0] and found[0] == found[1] == found[2]
