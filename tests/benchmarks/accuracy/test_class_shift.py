"""Calibration on one kind of protein and evaluation on another."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.accuracy import class_shift
from benchmarks.harness import embedded


@pytest.mark.parametrize("grouping", [class_shift.CLASSES, class_shift.SOURCES], ids=lambda grouping: grouping.column)
def test_no_protein_is_used_for_calibration_and_evaluation(grouping: class_shift.Grouping) -> None:
    tested, calibrations = class_shift.split(grouping)
    assert list(tested) == list(grouping.groups)
    assert list(calibrations) == [class_shift.MIXED, *grouping.groups]
    known = embedded.manifest()
    measured = [protein.id for proteins in tested.values() for protein in proteins]
    assert len(measured) == len(set(measured)) == grouping.tested * len(grouping.groups)
    for group, proteins in tested.items():
        assert {known[protein.id][grouping.column] for protein in proteins} == {group}
        assert all(60 <= len(protein.sequence) <= 350 for protein in proteins)
    for name, proteins in calibrations.items():
        assert not set(measured) & {protein.id for protein in proteins}
        # As many residues in each, up to one protein.
        assert 0.88 * grouping.max_residues < sum(len(p.sequence) for p in proteins) <= grouping.max_residues
        groups = [known[protein.id][grouping.column] for protein in proteins]
        if name == class_shift.MIXED:
            counts = [groups.count(group) for group in grouping.groups]
            assert max(counts) - min(counts) <= 1
        else:
            assert set(groups) == {name}


def test_a_group_with_too_few_proteins_is_refused() -> None:
    with pytest.raises(ValueError, match="has too few residues"):
        class_shift.split(dataclasses.replace(class_shift.CLASSES, max_residues=100_000))
    with pytest.raises(ValueError, match=r"mainly_alpha has \d+ proteins to evaluate, not 500"):
        class_shift.split(dataclasses.replace(class_shift.CLASSES, tested=500))


def test_a_row_of_the_class_shift_has_one_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_shift, "TESTED_PRESETS", ("paper",))
    grouping = class_shift.Grouping("class", ("mainly_alpha", "mainly_beta"), max_residues=400, tested=1)
    rows = [one.measure(1) for one in class_shift.cases([grouping])]
    assert [row["calibrated_on"] for row in rows] == ["all kinds", "mainly_alpha", "mainly_beta"]
    for row in rows:
        assert row["grouping"] == "class"
        assert row["calibration_residues"] <= 400
        assert row["provenance"]["calibration"]["residues"] == row["calibration_residues"]
        assert set(row["presets"]["paper"]) == {"mainly_alpha", "mainly_beta"}
    kls = [row["presets"]["paper"]["mainly_beta"]["kl_mean"] for row in rows]
    assert len(set(kls)) == 3
