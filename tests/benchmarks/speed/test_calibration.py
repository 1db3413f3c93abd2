"""A calibration, phase by phase."""

from __future__ import annotations

import pytest

from benchmarks.speed import calibration
from tests.helpers.benchmark_cases import measured


def test_a_case_has_every_phase_and_the_size_of_the_file() -> None:
    [case] = calibration.embedded_cases(proteins=4, mib=9.0)
    assert case.shape["proteins"] == 4
    figures = measured(case, 1)
    phases = ("gather", "fit", "measure", "write")
    assert figures["first seconds"].keys() == figures["seconds"].keys() == {*phases, "all", "fit, preset by preset"}
    first = figures["first seconds"]
    assert first["all"] == pytest.approx(sum(first[phase] for phase in phases))
    assert 1 < figures["file MiB"] < 9


def test_there_are_no_cases_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.torch.cuda, "is_available", lambda: False)
    assert not list(calibration.random_cases(calibration.Architecture("tiny"), 1.0, 1.0, None))
