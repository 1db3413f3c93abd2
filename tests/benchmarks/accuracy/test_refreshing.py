"""What runs again beside new residues, and corrections."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import refreshing


def test_schedules_and_corrections_are_measured_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refreshing, "schedules", lambda layers: {
        "8 in all layers": [8] * layers, "64 in all layers": [64] * layers, "everything": [-1] * layers,
        "a part": [64] * 6 + [8] * 6, "joint at the end": [8] * 11 + [-1],
    })  # fmt: skip
    case, other = refreshing.cases(2)
    assert [case.model, other.model] == ["esm2-mini", "esmc-mini"]
    assert case.check().passed
    figures = case.measure(1)
    arms = figures["arms"]
    assert (figures["domains"], figures["training_proteins"]) == (2, 2)
    assert arms["8 in all layers"]["cost"] == 12 * 17 and arms["a part"]["cost"] == 6 * 73 + 6 * 17
    # Nothing is frozen if every layer runs the whole context.
    assert arms["everything"]["kl_mean"] < 1e-8 < arms["64 in all layers"]["kl_mean"]
    assert arms["64 in all layers"]["kl_mean"] < arms["8 in all layers"]["kl_mean"]
    assert arms["joint at the end"]["cost"] > arms["8 in all layers"]["cost"]
    for name in ("outputs", "keys and values"):
        corrected = arms[f"8 in all layers, {name} corrected"]
        assert corrected["cost"] > 12 * 17 and corrected["kl_mean"] != arms["8 in all layers"]["kl_mean"]
