"""Calibrations by size and by class."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import calibration_sets


def test_a_row_counts_the_calibration_and_has_every_class_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_sets, "_DRAWS", {2: 1})
    monkeypatch.setattr(calibration_sets, "_PRESETS", ("turbo3",))
    [case] = calibration_sets.size_cases(1)
    figures = case.measure(1)
    assert figures["calibration_proteins"] == 2
    assert figures["presets"]["turbo3"]["all"]["cosine_mean"] > 0.99


def test_calibrations_on_classes_are_of_one_size_and_apart_from_what_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}

    def calibrate(model: object, proteins: list[object], **options: object) -> None:
        seen[case.name] = proteins
        raise InterruptedError

    monkeypatch.setattr(calibration_sets, "calibrate_records", calibrate)
    for case in calibration_sets.class_cases(3):
        with pytest.raises(InterruptedError):
            case.measure(1)
    assert set(seen) == {"all classes", *calibration_sets.CLASSES}
    for group, proteins in seen.items():
        assert 0.9 < sum(len(protein.sequence) for protein in proteins) / 12_000 <= 1
        assert {protein.structural_class for protein in proteins} == (
            set(calibration_sets.CLASSES) if group == "all classes" else {group}
        )
