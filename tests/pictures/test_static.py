"""Figures of matplotlib: what is drawn, and where."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo.pictures.logo import logo_sheet
from esm_turbo.pictures.panels import Heatmap, Lines, Scatter, Sheet, Tracks
from esm_turbo.pictures.ranking import ranking_sheet
from esm_turbo.pictures.static import figure, number_text
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


def test_the_names_of_tracks_stand_on_the_page(variants) -> None:
    drawn = figure(variant_sheet(variants, "model x"))
    drawn.draw_without_rendering()
    names = {text.get_text(): text.get_window_extent() for axes in drawn.axes for text in axes.texts}
    assert "|arm - full|\n(mean, nats)" in names
    for name, box in names.items():
        assert box.x0 >= 0 and box.x1 <= drawn.bbox.x1, name


def long_tracks(count: int) -> Sheet:
    columns = list(range(1, count + 1))
    values = np.zeros((20, count))
    heatmap = Heatmap(values, list("ACDEFGHIKLMNPQRSTVWY"), columns, "score (nats)", "position", centred=True)
    return Sheet("t", "c", [Tracks([Lines(columns, {"a": np.ones(count)}, "x", "y"), heatmap], columns, ["A"] * count)])


@pytest.mark.parametrize(("count", "lines"), [(1, 1), (105, 1), (106, 2), (925, 9)])
def test_long_proteins_are_broken_into_lines_of_the_same_width(count: int, lines: int) -> None:
    drawn = figure(long_tracks(count))
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


def test_a_ranking_prints_the_residues_of_the_best(ranking) -> None:
    drawn = figure(ranking_sheet(ranking, "model x"))
    best = [ranking.candidates[index].sequence for index in ranking.ranking()[:20]]
    letters = [text.get_text() for axes in drawn.axes for text in axes.texts if len(text.get_text()) == 1]
    assert "".join(letters) == "".join(best)
    assert cells(drawn) == sum(map(len, best))


def test_a_logo_draws_one_letter_for_each_share(designs) -> None:
    drawn = figure(logo_sheet(designs, "ACDEFGHI", "model x"))
    logo = drawn.axes[0]
    heights = sorted(patch.get_window_extent().height / logo.bbox.height for patch in logo.patches)
    assert len(heights) == 6 and heights[-1] == pytest.approx(1, abs=0.05)


def test_groups_have_a_legend_and_numbers_a_scale() -> None:
    x = np.arange(3.0)
    points = {"x": x, "y": x, "names": ["a", "b", "c"], "x_label": "x", "y_label": "y", "group_label": "kind"}
    named = figure(Sheet("t", "c", [[Scatter(**points, groups=["u", "v", "u"])]]))
    assert [text.get_text() for text in named.axes[0].get_legend().get_texts()] == ["u", "v"]
    scaled = figure(Sheet("t", "c", [[Scatter(**points, groups=x)]]))
    assert scaled.axes[0].get_legend() is None and scaled.axes[1].get_ylabel() == "kind"


@pytest.mark.parametrize(("value", "text"), [(15.0, "15.0"), (0.00123, "0.00123"), (44930, "44,930"), (5.391, "5.39")])
def test_numbers(value: float, text: str) -> None:
    assert number_text(value) == text
