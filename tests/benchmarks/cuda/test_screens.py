"""Screens of many targets as far as a machine without a device can run them."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("stopped_by", ["memory", "time"])
def test_contexts_in_a_full_pool(stopped_by: str, no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (250_000, 10**9))
    seconds = 600.0 if stopped_by == "memory" else -1.0
    if stopped_by == "time":
        clock = iter(range(100))
        monkeypatch.setattr(screens.time, "perf_counter", lambda: 0.1 * next(clock))
        seconds = 0.15
    [case] = screens.resident_cases(TINY, "turbo2", 30, 4, spare=50_000, seconds=seconds, at_least=3)
    figures = measured(case)
    assert figures["stopped_by"] == stopped_by
    assert figures["contexts"] == figures["pool"]["held"] >= 4
    assert figures["pool"]["bytes"] <= 200_000
    assert figures["pool"]["evicted"] == 0
    assert figures["read_at_random"]["compared"] == 4
    assert figures["read_at_random"]["largest_difference"] < 0.05
