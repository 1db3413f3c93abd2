"""The overhead of writing a cache."""

from __future__ import annotations

from benchmarks.speed import prefill
from esm_turbo.config import PRODUCT_PRESETS
from tests.helpers.benchmark_cases import TINY, measured


def test_every_preset_is_compared_with_a_plain_forward_pass() -> None:
    cases = list(prefill.random_cases(TINY, tokens=(10, 20)))
    assert len(cases) == 2
    figures = measured(cases[0], 1)
    assert figures["ratios"].keys() == {f"prefill {preset} / forward" for preset in PRODUCT_PRESETS}
