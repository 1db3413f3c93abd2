"""Bytes across layers and heads."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import allocation


def test_bytes_go_where_they_are_worth_most_at_the_same_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "BUDGETS", (12, 16, 20))
    monkeypatch.setattr(allocation, "_PRESETS", {"turbo1": 16})
    case, other = allocation.cases(1)
    assert [case.model, other.model] == ["esm2-mini", "esmc-mini"]
    assert case.check().passed
    [row] = case.measure(1)
    assert (row["preset"], row["calibration_proteins"], row["proteins"]) == ("turbo1", 1, 1)
    arms = row["arms"]
    for name, units in {"same": 12, "layers": 12, "heads": 48}.items():
        assert len(arms[name]["bytes"]) == units and sum(arms[name]["bytes"]) <= 16 * units
        assert set(arms[name]["bytes"]) <= {12, 16, 20} and 0.9 < arms[name]["cosine_q01"] < 1
    assert arms["layers"]["added_error_on_calibration"] < arms["same"]["added_error_on_calibration"]
    assert len(set(arms["heads"]["bytes"])) > 1
