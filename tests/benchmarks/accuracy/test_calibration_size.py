"""Accuracy by the size of the calibration set."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy import calibration_size
from benchmarks.harness import embedded
from esm_turbo import TurboEsm


def test_draws_of_calibrations_share_no_protein(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    honest = calibration_size.calibrate_records

    def watched(turbo: TurboEsm, proteins: Any, **options: Any) -> Any:
        seen.append([protein.id for protein in proteins])
        return honest(turbo, proteins, **options)

    monkeypatch.setattr(calibration_size, "calibrate_records", watched)
    monkeypatch.setattr(calibration_size, "TESTED_PRESETS", ("paper",))
    monkeypatch.setattr(calibration_size, "_STRIDES", {"paper_six": 6})
    rows = [row for one in calibration_size.cases({2: 2}) for row in one.measure(1)]
    assert [(row["calibration_proteins"], row["draw"], row["proteins"]) for row in rows] == [
        (2, 0, "paper_six.fasta"),
        (2, 1, "paper_six.fasta"),
    ]
    shipped = [protein.id for protein in embedded.shipped_proteins()]
    assert seen == [shipped[:2], shipped[2:4]]
    assert rows[0]["presets"]["paper"]["kl_mean"] != rows[1]["presets"]["paper"]["kl_mean"]
    assert max(size * count for size, count in calibration_size.DRAWS.items()) <= len(shipped)
