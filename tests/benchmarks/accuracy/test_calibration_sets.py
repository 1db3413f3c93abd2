"""Calibrations by size."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import calibration_sets


def test_a_row_counts_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_sets, "_DRAWS", {2: 1})
    monkeypatch.setattr(calibration_sets, "_PRESETS", ("turbo3",))
    [case] = calibration_sets.size_cases(1)
    figures = case.measure(1)
    assert figures["calibration_proteins"] == 2
    assert figures["presets"]["turbo3"]["all"]["cosine_mean"] > 0.99
