"""Runs on one device by the number of proteins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speed import run_lengths


def test_every_number_of_proteins_is_timed(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--device", "cpu", "--layers", "1", "--hidden", "32", "--heads", "2"]
    run_lengths.main([*tiny, "--store", "4", "2", "--embed", "3", "--save"])
    figures = json.loads(capsys.readouterr().out)
    assert {name: list(found) for name, found in figures["seconds"].items()} == {"embed": ["3"], "store": ["2", "4"]}
    assert all(seconds > 0 for found in figures["seconds"].values() for seconds in found.values())
    [record] = map(json.loads, (results / "run_lengths.jsonl").read_text().splitlines())
    assert record["figures"] == figures and record["model"] == "random weights"
