"""Reading from a store."""

from __future__ import annotations

from benchmarks.speed import context_store
from tests.helpers.benchmark_cases import TINY, measured


def test_reading_is_compared_with_the_prefill() -> None:
    [case] = context_store.random_cases(TINY, (30,), "turbo3")
    figures = measured(case, 1)
    assert figures["ratios"].keys() == {"prefill / disk", "prefill / host memory"}
    assert figures["bytes"]["file"] > figures["bytes"]["cache"] > 0
