"""Figures of matplotlib: what is drawn, where, and in which colours."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from esm_turbo.pictures.logo import logo_sheet
from esm_turbo.pictures.panels import Bars, Heatmap, Lines, Scatter, Sheet, Tracks
from esm_turbo.pictures.ranking import ranking_sheet
from esm_turbo.pictures.static import figure
from esm_turbo.pictures.variant_map import variant_sheet


def texts(drawn) -> str:
    parts = [text.get_text() for text in drawn.texts]
    for axes in drawn.axes:
        parts += [axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()]
        parts += [text.get_text() for text in axes.texts]
        parts += [label.get_text() for label in [*axes.get_xticklabels(), *axes.get_yticklabels()]]
    return "\n".join(parts)


def cells(drawn) -> int:
    return sum(
        int(np.ma.count(mesh.get_array()))
        for axes in drawn.axes
        for mesh in axes.collections
        if type(mesh).__name__ == "QuadMesh" and not hasattr(axes, "_colorbar")
    )


def test_a_variant_map_has_its_cells_axes_and_units(variants) -> None:
    drawn = figure(variant_sheet(variants, "model x"))
    assert cells(drawn) == 20 * 8
    shown = texts(drawn)
    for part in ("position", "mutant residue", "score (nats)", "measured fitness", "mean effect\n(nats)", "model x"):
        assert part in shown
    # Foreign text is no formula.
    assert r"\$x^2\$" in drawn.texts[0].get_text()


def tracks_of(columns: list[int]) -> Sheet:
    values = np.zeros((20, len(columns)))
    heatmap = Heatmap(values, list("ACDEFGHIKLMNPQRSTVWY"), columns, "score (nats)", "position", centred=True)
    lines = Lines(columns, {"a": np.ones(len(columns))}, "x", "y", filled=True)
    return Sheet("t", "c", [Tracks([lines, heatmap], columns, ["A"] * len(columns))])


@pytest.mark.parametrize(("count", "lines"), [(1, 1), (105, 1), (106, 2), (925, 9)])
def test_long_proteins_are_broken_into_lines_of_the_same_width(count: int, lines: int) -> None:
    drawn = figure(tracks_of(list(range(1, count + 1))))
    assert cells(drawn) == 20 * count
    maps = [axes for axes in drawn.axes if axes.get_ylim() == (19.5, -0.5)]
    assert len(maps) == lines
    width, height = drawn.get_size_inches()
    sizes = [axes.get_position().width * width / np.ptp(axes.get_xlim()) for axes in maps]
    assert max(sizes) == pytest.approx(min(sizes)) and min(sizes) > 0.08
    # Nothing lies outside of the page.
    places = [axes.get_position() for axes in drawn.axes]
    assert min(place.y0 for place in places) > 0 and max(place.y1 for place in places) < 1
    assert max(place.x1 for place in places) < 1
    assert height > lines * 2


LONG = "a label that is longer than the panel beside which it stands, relative to the mean"


def beside(*panels) -> Sheet:
    return Sheet("t", "c", [panels])


@pytest.mark.parametrize(
    "sheet",
    [
        beside(*(Heatmap(np.ones((2, 9)), ["a"] * 2, list(range(9)), LONG, "x") for _ in range(2))),
        beside(Heatmap(np.ones((20, 9)), [LONG] * 20, [f"{LONG}{n}" for n in range(9)], "nats", "x")),
        beside(*(Scatter(np.arange(3.0), np.arange(3.0), ["a"] * 3, "x", "y", LONG) for _ in range(3))),
        beside(Bars([LONG, "b"], np.array([1e6, 2e6]), "x", LONG)),
        Sheet("t", "c", [Tracks([Lines([1, 2], {LONG[:20]: np.ones(2), "b": np.zeros(2)}, "x", "y")], [1, 2], "AC")]),
    ],
)
def test_nothing_reaches_beyond_the_page(sheet: Sheet) -> None:
    drawn = figure(sheet)
    box, (width, height) = drawn.get_tightbbox(), drawn.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


@pytest.mark.parametrize(
    ("columns", "shown", "upright"),
    [
        ([24], {24}, False),
        ([24, 68, 69, 70], {24, 68, 69, 70}, False),
        (list(range(1, 77)), set(range(10, 77, 10)), False),
        # Those after a gap come first, and what touches them is left out.
        ([*range(11, 51), *range(301, 331)], {11, 20, 30, 40, 301, 310, 320, 330}, False),
        (list(range(3, 600, 7)), set(range(3, 600, 7)), True),
        (list(range(1001, 1021)), set(range(1001, 1021, 2)), False),
    ],
)
def test_numbers_are_those_of_the_columns_and_do_not_touch(columns, shown, upright) -> None:
    drawn = figure(tracks_of(columns))
    axes = next(axes for axes in drawn.axes if axes.get_xlabel() == "position")
    labels = axes.get_xticklabels()
    found = [int(label.get_text()) for label in labels]
    assert [columns[int(label.get_position()[0])] for label in labels] == found
    assert set(found) == shown
    drawn.draw_without_rendering()
    boxes = [label.get_window_extent() for label in labels]
    # Boxes of text are taller than digits.
    overlap = 0.2 * boxes[0].width if upright else 0
    assert all(a.x1 <= b.x0 + overlap for a, b in pairwise(boxes))
    assert bool(boxes[-1].height > boxes[-1].width) == upright
    assert min(box.y0 for box in boxes) > axes.xaxis.label.get_window_extent().y1 > 0


def test_gaps_separate_what_is_not_beside_each_other() -> None:
    upper, lower, _ = figure(tracks_of([3, 7, 8, 10])).axes
    assert [line.get_xdata()[0] for line in lower.lines if line.get_color() == "white"] == [0.5, 2.5]
    pieces = [patch.get_data().edges.tolist() for patch in upper.patches if not patch.get_fill()]
    assert pieces == [[-0.5, 0.5], [0.5, 1.5, 2.5], [2.5, 3.5]]


def test_a_ranking_prints_the_residues_of_the_best(ranking) -> None:
    drawn = figure(ranking_sheet(ranking, "model x"))
    best = [ranking.candidates[index].sequence for index in ranking.ranking()[:20]]
    letters = [text.get_text() for axes in drawn.axes for text in axes.texts if len(text.get_text()) == 1]
    assert "".join(letters) == "".join(best)
    assert cells(drawn) == sum(map(len, best))


def test_tracks_of_designs_have_round_ticks_within_the_track(designs) -> None:
    drawn = figure(logo_sheet(designs, "ACDEFGHI", "model x"))
    shown = {}
    for axes in drawn.axes[1:]:
        low, high = axes.get_ylim()
        shown[axes.get_ylabel().split("\n")[0]] = [
            label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high
        ]
    assert shown == {"entropy": ["0", "2", "4"], "mean log p": ["−3", "−2", "−1"], "input kept": ["0.0", "0.5", "1.0"]}


def test_a_logo_draws_one_letter_for_each_share(designs) -> None:
    drawn = figure(logo_sheet(designs, "ACDEFGHI", "model x"))
    logo = drawn.axes[0]
    heights = sorted(patch.get_window_extent().height / logo.bbox.height for patch in logo.patches)
    assert len(heights) == 6 and heights[-1] == pytest.approx(1, abs=0.05)


def test_names_of_points_cover_no_other() -> None:
    x, names = np.array([0.0, 0.01, 5.0]), ["first", "close to it", "far"]
    points = Scatter(x, np.zeros(3), names, "x", "y", labels=dict(enumerate(names)))
    [axes] = figure(Sheet("t", "c", [[points]])).axes
    assert [text.get_text() for text in axes.texts] == names
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))


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
