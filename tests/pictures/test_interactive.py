"""Figures of plotly: the same data, and what the mouse shows."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from esm_turbo.pictures.interactive import panel_figure, tracks_figure, tracks_width
from esm_turbo.pictures.logo import logo_sheet
from esm_turbo.pictures.palettes import MISSING
from esm_turbo.pictures.panels import Heatmap, Histogram, Lines, Logo, Scatter, Tracks
from esm_turbo.pictures.ranking import ranking_sheet
from esm_turbo.pictures.variant_map import effects, variant_sheet


def test_tracks_share_their_positions(variants) -> None:
    figure = tracks_figure(variant_sheet(variants, "").layout[0])
    [heatmap] = [trace for trace in figure.data if trace.type == "heatmap"]
    found = np.array(heatmap.z, dtype=float)
    np.testing.assert_allclose(found, effects(variants, "turbo"), rtol=1e-5)
    assert heatmap.customdata[0][0] == "M24R" and heatmap.zmin == -heatmap.zmax
    assert figure.layout.meta == {"positions": list(range(24, 32)), "letters": list("MKTAYIAK")}
    assert {trace.xaxis for trace in figure.data} <= {None, "x"}
    assert len({trace.yaxis or "y" for trace in figure.data}) == 4
    [dots] = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "markers"]
    assert dots.customdata[0] == "M24" and len(dots.x) == 8


def test_cells_without_a_value_are_grey_if_they_are_marked() -> None:
    panel = Heatmap(np.array([[0.5, np.nan], [1.0, 2.0]]), ["a", "b"], [1, 2], "nats", "position")
    for figure in (panel_figure(panel), tracks_figure(Tracks([panel], [1, 2], ["A", "C"]))):
        values, missing = figure.data[:2]
        assert [list(row) for row in values.z] == [[0.5, None], [1.0, 2.0]]
        assert [list(row) for row in missing.z] == [[None, 1], [None, None]]
        assert {colour for _, colour in missing.colorscale} == {MISSING}
        assert (missing.yaxis or "y") == (values.yaxis or "y") and missing.y == values.y
    assert len(panel_figure(replace(panel, missing=False)).data) == 1


def test_gaps_are_none_and_lone_values_are_marked() -> None:
    values = np.array([np.nan, 1.0, np.nan, 2.0, 3.0])
    [trace] = panel_figure(Lines([1, 2, 3, 4, 5], {"a": values}, "x", "y")).data
    assert trace.y == (None, 1.0, None, 2.0, 3.0) and trace.mode == "lines+markers"
    [trace] = panel_figure(Lines([1, 2], {"a": np.ones(2)}, "x", "y")).data
    assert trace.mode == "lines"


def test_filled_tracks_are_empty_where_there_is_no_value() -> None:
    values = np.array([-1.0, -2.0, np.nan, np.nan, -3.0])
    panel = Lines([1, 2, 3, 4, 5], {"a": values}, "position", "y", filled=True)
    area, line = tracks_figure(Tracks([panel], [1, 2, 3, 4, 5], list("ACDEF"))).data
    # An area of plotly would span the gap; bars as wide as their columns do not.
    assert area.type == "bar" and area.y == (-1.0, -2.0, None, None, -3.0) and area.x == (0, 1, 2, 3, 4)
    # As wide as the bars; a lone value, too.
    assert line.x == (-0.5, 0, 1, 1.5, 1.5, 3.5, 4, 4.5, 4.5)
    assert line.y == (-1.0, -1.0, -2.0, -2.0, None, -3.0, -3.0, -3.0, None)
    assert line.customdata == (1, 1, 2, 2, "", 5, 5, 5, "")
    assert (line.fill, line.mode, line.line.shape) == (None, "lines", "hvh")


def test_positions_left_out_are_gaps() -> None:
    columns, letters = [3, 7, 8], list("ACD")
    panels = [Lines(columns, {"a": np.array([1.0, 2.0, 3.0])}, "position", "y"),
              Heatmap(np.ones((2, 3)), ["a", "b"], columns, "nats", "position")]  # fmt: skip
    figure = tracks_figure(Tracks(panels, columns, letters))
    line, cells = figure.data[:2]
    assert line.x == (-0.5, 0, 0.5, 0.5, 0.5, 1, 2, 2.5, 2.5)
    assert line.y == (1, 1, 1, None, 2, 2, 3, 3, None) and line.customdata == (3, 3, 3, "", 7, 7, 8, 8, "")
    assert list(cells.x) == [0, 1, 2] and figure.layout.meta == {"positions": columns, "letters": letters}
    [gap] = figure.layout.shapes
    # As tall as the map.
    assert (gap.x0, gap.x1, gap.y0, gap.y1) == (0.5, 0.5, *figure.layout.yaxis2.domain)


def test_few_columns_are_not_drawn_out(designs) -> None:
    def tracks(count: int) -> Tracks:
        columns = list(range(1, count + 1))
        return Tracks([Heatmap(np.ones((2, count)), ["a", "b"], columns, "", "")], columns, ["A"] * count)

    assert tracks_width(tracks(1)) < tracks_width(tracks(10)) < 500 and tracks_width(tracks(300)) > 2000
    assert tracks_width(tracks(3)) <= tracks_width(logo_sheet(designs, "ACDEFGHI", "").layout[0]) < 500


def test_letters_of_a_logo_fill_their_share(designs) -> None:
    figure = tracks_figure(logo_sheet(designs, "ACDEFGHI", "").layout[0])
    assert len(figure.layout.shapes) == 6
    heights, widths = [], []
    for shape in figure.layout.shapes:
        numbers = [pair.split(",") for pair in shape.path.replace("M", " ").replace("L", " ").replace("Q", " ")
                   .replace("C", " ").replace("Z", " ").split()]  # fmt: skip
        xs, ys = ([float(pair[axis]) for pair in numbers] for axis in (0, 1))
        heights.append(round(max(ys) - min(ys), 3))
        widths.append(round(max(xs) - min(xs), 2))
    assert sorted(heights) == [0.25, 0.25, 0.25, 0.5, 0.75, 1.0] and set(widths) == {0.92}
    hovers = {trace.name: trace.y for trace in figure.data if trace.type == "bar"}
    assert hovers["A"] == (1.0, 0.5, 0.0)


def test_an_isoleucine_of_a_logo_is_no_block() -> None:
    logo = Logo(np.array([[1.0]]), "I", [4], "share", "position")
    [shape] = tracks_figure(Tracks([logo], [4], ["A"])).layout.shapes
    xs = [float(x) for x in re.findall(r"(-?[\d.]+),", shape.path)]
    assert (min(xs), max(xs)) == (-0.184, 0.184)


def test_rows_of_a_ranking_are_apart_although_they_have_no_names(ranking) -> None:
    heatmap = ranking_sheet(ranking, "").layout[0][1]
    [trace] = panel_figure(heatmap).data
    assert list(trace.y) == list(range(20))
    assert "".join(trace.text[0]) == heatmap.letters[0]


def test_foreign_text_is_no_html() -> None:
    points = Scatter(np.zeros(1), np.zeros(1), ["<img src=x>"], "a<b", "y", "t<i>", groups=["<b>g"], labels={0: "<b>n"})
    figure = panel_figure(points)
    assert figure.data[0].customdata == ("&lt;img src=x&gt;",)
    assert figure.data[0].name == "&lt;b&gt;g" and figure.data[0].text == ("&lt;b&gt;n",)
    assert "a&lt;b" in figure.data[0].hovertemplate and figure.layout.title.text == "t&lt;i&gt;"


@pytest.mark.parametrize("count", [1, 500])
def test_a_histogram_counts_everything(count: int) -> None:
    figure = panel_figure(Histogram(np.linspace(1, 2, count), "x", {"best": 1.0}, "candidates"))
    assert sum(figure.data[0].y) == count
    assert [line.x0 for line in figure.layout.shapes] == [1.0]
