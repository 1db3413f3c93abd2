"""Time and memory of extensions."""

from __future__ import annotations

import pytest

from benchmarks.harness.names import COMPRESSED
from benchmarks.speed import extension
from tests.helpers.benchmark_cases import TINY, measured


def test_speed_against_recomputing_and_full_precision() -> None:
    [case] = extension.speed_cases(TINY, context_tokens=40, new_tokens=4)
    figures = measured(case, 1)
    assert {f"recompute / extend {preset}" for preset in ("exact", *COMPRESSED)} <= figures["ratios"].keys()
    ratio = figures["seconds"]["extend paper"]["p50"] / figures["seconds"]["extend exact"]["p50"]
    assert figures["ratios"]["extend paper / extend exact"] == pytest.approx(ratio)
    assert len(case.targets) == 6 + 5
