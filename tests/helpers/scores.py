"""Scores of the same candidates and variants from batches of other rows."""

from __future__ import annotations

import dataclasses

import numpy as np

from esm_turbo.tasks.scoring.score import Scores
from esm_turbo.tasks.variants.score import VariantScores


def assert_close(found: Scores, expected: Scores) -> None:
    """The same but for rounding, which may also move a number across the boundary of its code."""
    assert (found.arm, found.preset, found.place, found.refresh, found.model) == (
        expected.arm,
        expected.preset,
        expected.place,
        expected.refresh,
        expected.model,
    )
    assert [one.candidate for one in found.scores] == [one.candidate for one in expected.scores]
    values, others = ([x for c in scores.scores for x in c.log_probabilities] for scores in (found, expected))
    np.testing.assert_allclose(values, others, rtol=0, atol=1e-4 if found.preset == "exact" else 1e-3)


def assert_variants_close(found: VariantScores, expected: VariantScores) -> None:
    """Scores of the same variants, computed in other batches; see `assert_close`."""
    assert dataclasses.replace(found, scores=()) == dataclasses.replace(expected, scores=())
    assert [one.variant for one in found.scores] == [one.variant for one in expected.scores]
    at_most = 1e-4 if expected.preset in (None, "exact") else 2e-3
    np.testing.assert_allclose(found.values, expected.values, rtol=0, atol=at_most)
