"""Ranges of colours."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo.pictures.panels import Heatmap, Tracks


def heatmap(values, **options) -> Heatmap:
    return Heatmap(np.array(values, dtype=np.float64), ["a"], [1], "score", "position", **options)


def test_colours_are_centred_at_zero_without_outliers() -> None:
    low, high = heatmap([[*np.linspace(-4, 1, 999), 1000.0]], centred=True).range
    assert low == -high and high == pytest.approx(4, abs=0.1)


def test_missing_values_do_not_count() -> None:
    assert heatmap([[np.nan, -2.0]], centred=True).range == (-2.0, 2.0)
    assert heatmap([[np.nan]], centred=True).range == (-1.0, 1.0)
    assert heatmap([[np.nan]]).range == (0.0, 1.0)
    assert heatmap([[0.0, np.nan]], centred=True).range == (-1.0, 1.0)


def test_colours_span_values_or_the_given_limits() -> None:
    low, high = heatmap([np.arange(1001.0)]).range
    assert (low, high) == (5.0, 995.0)
    assert heatmap([[3.0]]).range == (2.5, 3.5)
    assert heatmap([[3.0]], limits=(0, 1)).range == (0, 1)


@pytest.mark.parametrize(
    ("columns", "breaks"), [([], []), ([7], []), ([-1, 0, 1], []), ([3, 5, 6, 9], [1, 3]), ([1, 2, 4], [2])]
)
def test_tracks_break_where_positions_are_left_out(columns: list[int], breaks: list[int]) -> None:
    assert Tracks([], columns, [""] * len(columns)).breaks == breaks
