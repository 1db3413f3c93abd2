"""Rows of the scoring benchmarks."""

from __future__ import annotations

import pytest

from benchmarks.harness.measure import Case
from benchmarks.speed import scoring


def test_a_speed_row_combines_context_and_candidates() -> None:
    [case] = scoring.candidate_cases(
        target_residues=40,
        candidate_residues=3,
        full_candidates=1,
        cached_candidates=2,
        refreshes=(0, 8),
        at_least=1.0,
    )
    assert isinstance(case, Case) and case.check().passed
    figures = case.measure(1)
    context, each = figures["seconds"]["context turbo"]["p50"], figures["seconds"]["turbo, 8 refreshed"]["p50"] / 2
    rate = figures["candidates_per_second"]["turbo, 8 refreshed, 20 candidates"]
    assert rate == pytest.approx(20 / (context + 20 * each))
    ratio = figures["ratios"]["turbo, 8 refreshed, 20 candidates / full"]
    assert ratio == pytest.approx(rate / figures["candidates_per_second"]["full"])
    assert case.targets[0].judge(figures)["at_least"] == 1.0


def test_all_positions_are_counted() -> None:
    [case] = scoring.position_cases(residues=30, full_positions=3, cached_positions=5, refreshes=(0,))
    assert case.check().passed
    figures = case.measure(1)
    assert figures["seconds_for_all_positions"]["full"] == pytest.approx(10 * figures["seconds"]["full"]["p50"])
