"""Screens of many targets as far as a machine without a device can run them."""

from __future__ import annotations

import pytest

from benchmarks.cuda import screens
from tests.helpers.benchmark_cases import TINY, measured


def test_rates_of_many_targets(no_device: None) -> None:
    [case] = screens.pool_cases(TINY, "turbo2", 5, (20, 90), 2, 3, 4, 7, at_least=0.6)
    figures = measured(case)
    assert case.shape["rows"] == 30
    assert figures["pool"]["contexts"] == figures["pool"]["held"] == 5
    # A millisecond per letter of an arm's name.
    assert figures["per_second"][screens.ONE] == pytest.approx(30 / 0.010)
    assert figures["ratios"]["many targets / one target"] == pytest.approx(10 / 12)
