"""Where peptides stand on their targets."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import specificity
from esm_turbo.tasks.scoring.pairs import PairScores
from esm_turbo.tasks.scoring.score import CandidateScore, Scores


def scores(*values: float) -> Scores:
    ones = (CandidateScore(name, (value,)) for name, value in zip("ACDEF", values, strict=True))
    return Scores(tuple(ones), "frozen", "exact", "masked", 8, "m")


def test_percentiles_first_places_and_resemblance_of_rankings() -> None:
    found = PairScores((scores(-1, -2, -3, -4, -5), scores(-5, -2, -2, -3, -4)), {})
    places = specificity.places(found, [0, 0, 1], ["A", "D", "C"], lambda one: one.mean_log_probability)
    assert places["percentiles"] == [0, 0.5, 0.125] and places["first"] == 1
    # Ranks 5 to 1 against 1, 4.5, 4.5, 3, 2: (44.5 - 45) / sqrt(10 * 9.5).
    assert places["between_targets"] == pytest.approx(-0.0513, abs=1e-4)


def test_one_case_of_all_targets() -> None:
    [case] = specificity.cases()
    assert case.shape == {"dtype": "float32", "targets": 92, "candidates": 92}
    [case] = specificity.cases(5)
    assert case.shape["targets"] == 5
