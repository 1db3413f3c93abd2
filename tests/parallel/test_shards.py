"""Manifests of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from esm_turbo.parallel.shards import (
    Manifest,
    ShardError,
    damage,
    finish_shard,
    input_digests,
    is_done,
    manifest_name,
    shard_output,
    shards_folder,
    shards_state,
)
from esm_turbo.proteins.fasta import BadRecord
from esm_turbo.tasks.common.pieces import Plan, Shard


def manifest(folder: Path, number: int = 1, names: Sequence[str] = ("a", "b", "c"), **settings: object) -> Manifest:
    (folder / "in.fasta").write_text(">a\nMK\n")
    plan = Plan(Shard(number, 2))
    plan.choose([[index] for index in range(len(names))], names, range(len(names), 0, -1))
    return Manifest(
        plan.shard, "score", "table", input_digests([folder / "in.fasta", None]), settings, {"device": "cpu"},
        plan.digest, order=[2, 0], failed=[["x", "y"]],
    )  # fmt: skip


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    out = tmp_path / "x.csv"
    made = manifest(tmp_path, weights="w")
    assert not is_done(out, made)
    shard_output(out, made.shard).parent.mkdir()
    shard_output(out, made.shard).write_text("rows\n")
    finish_shard(out, made)
    path = shards_folder(out) / manifest_name(made.shard)
    assert path == tmp_path / "x.csv.shards" / "_shard-00001-of-00002.json"
    assert Manifest.read(path) == made
    assert is_done(out, made) and not damage(path.parent, made)
    with pytest.raises(ShardError, match="shard 1/2 was made with another model: weights w, not v"):
        is_done(out, manifest(tmp_path, weights="v"))
    state = shards_state(out)
    assert (state.of, list(state.manifests), state.missing, state.failed) == (2, [1], [2], [BadRecord("x", "y")])
    # Under another number it is damaged.
    path.rename(path.with_name(manifest_name(Shard(2, 2))))
    assert "the manifest of shard 1/2" in shards_state(out).problems[0]


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"sha256": 1}', b"[" * 100_000])
def test_a_damaged_manifest_is_named_and_its_shard_not_done(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "x.csv"
    made = manifest(tmp_path)
    finish_shard(out, made)
    path = shards_folder(out) / manifest_name(made.shard)
    path.write_bytes(content)
    assert not is_done(out, made)
    [problem] = shards_state(out).problems
    assert problem.startswith(f"{path}: damaged (") and problem.endswith("; remove it and run the shard again")


def test_a_link_is_no_file_of_a_shard(tmp_path: Path) -> None:
    out, made = tmp_path / "x.csv", manifest(tmp_path)
    output = shard_output(out, made.shard)
    output.parent.mkdir()
    output.write_text("rows\n")
    finish_shard(out, made)
    output.rename(tmp_path / "elsewhere")
    output.symlink_to(tmp_path / "elsewhere")
    assert damage(output.parent, made) == [f"{output}: is missing"]


def test_inputs_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    targets, others, candidates = (tmp_path / name / "in.fasta" for name in ("targets", "others", "candidates"))
    for path, residues in ((targets, "MK"), (others, "WW"), (candidates, "GS")):
        path.parent.mkdir()
        path.write_text(f">a\n{residues}\n")
    out = tmp_path / "x.csv"
    shards_folder(out).mkdir()
    # The division of the input is the same.
    made, altered = (
        replace(manifest(tmp_path), inputs=input_digests([first, candidates])) for first in (targets, others)
    )
    assert list(made.inputs) == ["in.fasta", "in.fasta (2)"]
    finish_shard(out, made)
    assert is_done(out, made)
    with pytest.raises(ShardError, match=r"shard 1/2 was made with another content of in\.fasta;"):
        is_done(out, altered)
    finish_shard(out, replace(manifest(tmp_path, 2), inputs=altered.inputs))
    assert shards_state(out).problems == ["shard 2/2 is of another content of in.fasta as shard 1/2"]


def test_shards_of_versions_that_divide_otherwise_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "x.csv"
    shards_folder(out).mkdir()
    old, new = manifest(tmp_path), manifest(tmp_path, 2, names=["a", "b", "c", "d"])
    for made in (old, new):
        finish_shard(out, made)
    # Before it is run, a shard does not know its pieces.
    assert is_done(out, old)
    [problem] = shards_state(out).problems
    first, second = (manifest_name(made.shard) for made in (old, new))
    assert problem.startswith("shard 2/2 is of another division of the input as shard 1/2: ")
    assert f"remove {first} or {second}, whichever another version of esm_turbo made" in problem
    assert not shards_state(out).is_complete
    # As it says.
    (shards_folder(out) / first).unlink()
    finish_shard(out, manifest(tmp_path, 1, names=["a", "b", "c", "d"]))
    assert shards_state(out).is_complete
