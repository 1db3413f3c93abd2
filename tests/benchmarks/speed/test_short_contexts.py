"""Break-even of caching."""

from __future__ import annotations

import pytest

from benchmarks.speed import short_contexts
from tests.helpers.benchmark_cases import measured


def test_a_case_has_the_break_even() -> None:
    [case] = short_contexts.cases((20,), candidates=2, candidate_residues=4, refresh=2)
    figures = measured(case, 1)
    seconds = {name: row["p50"] for name, row in figures["seconds"].items()}
    saved = (seconds["full"] - seconds["turbo"]) / 2
    if saved > 0:
        assert figures["break_even_candidates"] == pytest.approx(seconds["prefill"] / saved)
    else:
        assert figures["break_even_candidates"] is None
