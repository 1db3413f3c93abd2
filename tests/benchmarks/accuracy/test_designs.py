"""Quality of designs by arm."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import designs


def test_designs_are_judged_against_those_of_the_full_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(designs, "_NEW", 2)
    monkeypatch.setattr(designs, "_ARMS", {"full": "exact", "turbo1": "turbo1"})
    assert [case.name for case in designs.cases()] == ["designs to the right", "designs in place"]
    for case in designs.cases(1):
        figures = case.measure(1)
        full, turbo = (figures["arms"][arm] for arm in ("full", "turbo1"))
        assert full["minus_full"] == [0.0] and full["same_residue"] == 1.0
        assert full["log_pseudo_perplexity"][0] > 0 and 0 <= turbo["same_residue"] <= 1
        expected = turbo["log_pseudo_perplexity"][0] - full["log_pseudo_perplexity"][0]
        assert turbo["minus_full"][0] == pytest.approx(expected, abs=1e-6)
