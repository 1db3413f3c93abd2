"""`esm-turbo generate`: output, and errors for invalid input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esm_turbo import TurboEsm

RECORDS = {"a": "MKTAYIAKQRQISFVKSHFSRQ", "b": "MKT", "c": "GSGSWKDLAEXPLLKRRVWTCACDEF"}


@pytest.fixture
def esm(esm: Callable[..., Any], tiny_folder: Path) -> Callable[..., Any]:
    """Run a command on a small model of random weights."""

    def run(*arguments: object) -> Any:
        return esm(*arguments, "--model", tiny_folder, "--preset", "exact") if len(arguments) > 1 else esm(*arguments)

    return run


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "in.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in RECORDS.items()))
    return path


def read(text: str) -> dict[str, tuple[dict[str, str], str]]:
    """Facts of the header and sequence of each entry, by identifier."""
    entries = {}
    for entry in text.strip().removeprefix(">").split("\n>"):
        header, sequence = entry.split("\n")
        name, *facts = header.split()
        entries[name] = dict(fact.split("=") for fact in facts), sequence
    return entries


def test_letters_are_filled(esm: Callable[..., Any], fasta: Path, tiny: TurboEsm) -> None:
    result = esm("generate", fasta, "--mask-letter", "X", "--seed", 3)
    # Two of the records have no X.
    assert result.code == 1 and "record 'b'" in result.err
    [(name, (facts, sequence))] = read(result.out).items()
    assert (name, facts["positions"], len(facts["new"])) == ("c_1", "11", 1)
    assert sequence == RECORDS["c"].replace("X", facts["new"])
    seeded = tiny.generate(RECORDS["c"].replace("X", "<mask>"), seed=[int(facts["seed"])])
    assert seeded.sequences == [sequence]
    refused = esm("generate", fasta, "--mask-letter", "A")
    assert refused.code == 2 and "--mask-letter must be one of B, X, Z, got 'A'" in refused.err


def test_residues_are_appended(esm: Callable[..., Any], fasta: Path, tiny: TurboEsm) -> None:
    result = esm("generate", fasta, "--max-new-tokens", 4, "--num-return-sequences", 2, "--seed", 3)
    assert (result.code, result.err) == (0, "")
    entries = read(result.out)
    assert list(entries) == ["a_1", "a_2", "b_1", "b_2", "c_1", "c_2"]
    for name, (facts, sequence) in entries.items():
        given = RECORDS[name[0]]
        assert sequence.startswith(given)
        assert (facts["run_model"], facts["run_preset"], facts["run_device"]) == ("tiny", "exact", "cpu")
        assert facts["positions"] == f"{len(given) + 1}-{len(given) + 4}"
        # The seed in the header reproduces the sequence.
        again = tiny.generate(given, max_new_tokens=4, seed=[int(facts["seed"])])
        assert again.sequences == [sequence]
        assert float(facts["mean_log_prob"]) == pytest.approx(sum(again.log_probs[0]) / 4, abs=2e-4)
    assert esm("generate", fasta, "--max-new-tokens", 4, "--num-return-sequences", 2, "--seed", 3).out == result.out
    assert esm("generate", fasta, "--max-new-tokens", 4, "--num-return-sequences", 2, "--seed", 4).out != result.out


def test_residues_are_replaced_within_constraints(esm: Callable[..., Any], fasta: Path) -> None:
    result = esm(
        "generate", fasta, "--positions", "1-2,3", "--allowed", "1=M", "2-3=AG", "--banned", "G", "--sweeps", 2,
        "--order", "confidence", "--json", "-",
    )  # fmt: skip
    assert result.code == 0
    found = json.loads(result.out)
    assert found["failed"] == []
    assert [one["record"] for one in found["sequences"]] == ["a", "b", "c"]
    for one in found["sequences"]:
        assert one["sequence"] == "MAA" + RECORDS[one["record"]][3:]
        assert one["positions"] == [1, 2, 3]
        assert len(one["log_probs"]) == 3


def test_sequences_are_written_to_a_file(esm: Callable[..., Any], fasta: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.fasta"
    result = esm("generate", fasta, "--max-new-tokens", 2, "--out", out)
    assert (result.code, result.out) == (0, f"3 sequences written to {out}\n")
    assert list(read(out.read_text())) == ["a_1", "b_1", "c_1"]
    assert [path.name for path in out.parent.iterdir()] == ["out.fasta"]


def test_bad_records_are_reported_and_the_others_used(esm: Callable[..., Any], fasta: Path) -> None:
    with fasta.open("a") as file:
        file.write(">d\nMK-T\n")
    # b has three residues, thus no fifth one.
    result = esm("generate", fasta, "--positions", "2,5", "--json", "-")
    assert result.code == 1
    found = json.loads(result.out)
    assert [one["record"] for one in found["sequences"]] == ["a", "c"]
    assert [one["record"] for one in found["failed"]] == ["d", "b"]
    lines = result.err.splitlines()
    assert "record 'd': position 3 is '-'" in lines[0]
    assert "record 'b': its positions are 1 to 3, got 5" in lines[1]
    assert len(lines) == 2


def test_a_file_without_a_usable_record_is_refused(esm: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "short.fasta"
    path.write_text(">a\nMKT\n")
    result = esm("generate", path, "--positions", "9", "--out", tmp_path / "out.fasta")
    assert (result.code, result.out) == (2, "")
    assert "nothing could be generated from any record" in result.err
    assert not (tmp_path / "out.fasta").exists()
    assert "no such file" in esm("generate", tmp_path / "absent", "--max-new-tokens", 2).err.lower()
