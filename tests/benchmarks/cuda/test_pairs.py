"""Pairs of targets and peptides as far as a machine without a device can score them."""

from __future__ import annotations

import pytest

from benchmarks.cuda import pairs
from tests.helpers.benchmark_cases import TINY, measured


def test_pairs(no_device: None) -> None:
    [case] = pairs.pair_cases(TINY, 3, (20, 31), 2, 4, at_least=650)
    assert case.shape["rows"] == 3 * 2 * 4
    assert case.check().error < 0.05
    figures = measured(case)
    for arm, rate in figures["per_second"].items():
        assert rate * figures["seconds"][arm]["p50"] == pytest.approx(6)
    # Time passes with the letters of an arm's name here.
    [(name, found)] = figures["ratios"].items()
    assert name == f"{pairs.APART} / {pairs.TOGETHER}" and found > 1
