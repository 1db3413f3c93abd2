"""Caches with and without their last sign planes."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import refinements
from benchmarks.harness import embedded


def test_caches_without_sign_planes_are_smaller_and_less_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinements, "evaluation_set", lambda name: embedded.evaluation_set("paper_six"))
    monkeypatch.setattr(refinements, "_STRIDE", 6)
    cases = list(refinements.cases())
    assert cases
    row = cases[-1].measure(1)
    assert isinstance(row, dict)
    whole, dropped = row["whole"], row["dropped"]
    assert dropped["bits_per_element"] < whole["bits_per_element"] - 0.01
    errors = [part["against_frozen"]["residues"]["relative_rms_error"] for part in (whole, dropped)]
    assert errors[0] < errors[1] < 1
