"""One device against several: its figures, and what it does where results differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.speed import devices
from esm_turbo import TurboEsm

TINY = ["--devices", "cpu", "cpu", "--proteins", "5", "--layers", "1", "--hidden", "32", "--heads", "2"]


def test_two_workers_are_timed_against_one(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices.main([*TINY, "--embedded", "7", "--stored", "3", "--dtype", "bfloat16", "--save"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["proteins"] == {"embed": 7, "store": 3, "score": 5}
    assert figures["largest_difference"] == {"embed": 0, "store": 0, "score": 0}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in figures["seconds"].values())
    assert figures["speedup"]["embed"] == figures["seconds"]["embed"][0] / figures["seconds"]["embed"][1]
    [record] = map(json.loads, (results / "devices.jsonl").read_text().splitlines())
    assert record["figures"] == figures and record["model"] == "random weights"


def test_figures_are_kept_where_results_differ(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Here:
        """In place of the processes."""

        def __init__(self, load: devices.Load, names: list[str]) -> None:
            self.turbo = load("cpu")

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, work: object, pieces: object, **_: object) -> list[object]:
            return []

    outcomes = iter([1.0, 1.0 + 1e-4])
    read = {"score": (lambda *_: None, lambda *_: {"protein": torch.full((2,), next(outcomes))})}
    monkeypatch.setattr(devices, "Workers", Here)
    monkeypatch.setattr(devices, "TASKS", read)
    with pytest.raises(SystemExit, match="the results of one device and of several differ: score"):
        devices.main([*TINY, "--save"])
    assert json.loads(capsys.readouterr().out)["largest_difference"]["score"] == pytest.approx(1e-4, rel=1e-2)
    assert len((results / "devices.jsonl").read_text().splitlines()) == 1


def test_the_largest_difference_is_that_of_one_protein() -> None:
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    assert devices.largest_difference(one, one) == 0
    other = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1.01])}
    assert devices.largest_difference(one, other) == pytest.approx(0.1)
    with pytest.raises(AssertionError, match="different proteins"):
        devices.largest_difference(one, {"a": one["a"]})


def test_proteins_beyond_the_shipped_ones_have_their_lengths_and_other_residues() -> None:
    found = devices.shipped_proteins(1300)
    assert len({protein.sequence for protein in found}) == len({protein.id for protein in found}) == 1300
    assert [len(protein.sequence) for protein in found[640:1280]] == [len(protein.sequence) for protein in found[:640]]


def test_results_are_read_back(turbo: TurboEsm, tmp_path: Path) -> None:
    proteins = devices.shipped_proteins(2)
    for name, (task, read) in devices.TASKS.items():
        found = read(turbo, proteins, tmp_path / name, task(turbo, proteins, tmp_path / name, None))
        assert set(found) == {protein.id for protein in proteins}
        assert all(value.isfinite().all() and value.norm() > 0 for value in found.values())
