"""What the mouse shows over a figure, and where."""

from __future__ import annotations

import json

import numpy as np
import pytest

from esm_turbo.pictures.hover import spots
from esm_turbo.pictures.logo import logo_sheet
from esm_turbo.pictures.panels import Bars, Heatmap, Histogram, Lines, Panel, Scatter, Sheet, Tracks
from esm_turbo.pictures.static import drawn_sheet
from esm_turbo.pictures.variant_map import effects, variant_sheet


def shown(sheet: Sheet) -> list:
    figure, placed = drawn_sheet(sheet, head=False)
    figure.draw_without_rendering()
    return json.loads(json.dumps(spots(figure, placed), allow_nan=False))


def alone(panel: Panel) -> dict:
    [spot] = shown(Sheet("t", "c", [[panel]]))
    return spot


def test_cells_of_a_variant_map_name_variant_and_score(variants) -> None:
    mean, entropy, cells, *_ = shown(variant_sheet(variants, ""))
    values = effects(variants, "turbo")
    assert cells["columns"] == list(range(24, 32))
    assert [len(row) for row in cells["texts"]] == [8] * 20
    assert cells["texts"][0][0] == f"M24R: {values[0, 0]:.3f}"
    assert next(text for _, _, text in mean["points"]).startswith("24, mean effect: ")
    # Tracks stand above each other, and their points in the middle of the columns of the map.
    left, top, width, height = cells["box"]
    assert mean["box"][0] == entropy["box"][0] == left and mean["box"][1] < entropy["box"][1] < top
    xs = [x for x, _, _ in mean["points"]]
    np.testing.assert_allclose(xs, left + width * (np.arange(8) + 0.5) / 8)
    assert 0 < left < left + width < 1 and 0 < top < top + height < 1


def test_long_tracks_are_found_in_their_line() -> None:
    columns = list(range(1, 152))
    panel = Lines(columns, {"a": np.ones(151)}, "position", "y")
    first, second = shown(Sheet("t", "c", [Tracks([panel], columns, ["A"] * 151)]))
    assert first["columns"] == columns[:76] and second["columns"] == columns[76:]
    assert next(text for _, _, text in second["points"]) == "77, a: 1"
    assert first["box"][1] < second["box"][1]
    # The second line is shorter by a column, and its columns are as wide.
    for line, count in ((first, 76), (second, 75)):
        left, _, width, _ = line["box"]
        np.testing.assert_allclose([x for x, _, _ in line["points"]], left + width * (np.arange(count) + 0.5) / count)


def test_a_column_of_a_logo_lists_its_residues(designs) -> None:
    logo = shown(logo_sheet(designs, "ACDEFGHI", ""))[0]
    assert logo["texts"] == [["2: A 100%", "3: A 50%, G 25%, C 25%", "7: W 75%, H 25%"]]


def test_cells_without_a_value_and_points_without_a_place_show_nothing() -> None:
    panel = Heatmap(np.array([[0.5, np.nan]]), ["a"], [1, 2], "nats", "position")
    assert alone(panel)["texts"] == [["a, 1: 0.500", ""]]
    gaps = Lines([1, 2, 3], {"a": np.array([1.0, np.nan, 3.0])}, "x", "y")
    assert [text for _, _, text in alone(gaps)["points"]] == ["1, a: 1", "3, a: 3"]


@pytest.mark.parametrize("log_y", [False, True])
def test_points_lie_where_they_are_drawn(log_y: bool) -> None:
    points = Scatter(np.array([1.0, 2.0]), np.array([1.0, 100.0]), ["a", "b"], "x", "y", log_y=log_y)
    spot = alone(points)
    left, top, width, height = spot["box"]
    (x1, y1, first), (x2, y2, second) = spot["points"]
    assert left < x1 < x2 < left + width and top < y2 < y1 < top + height
    assert (first, second) == ("a: 1, 1", "b: 2, 100")


@pytest.mark.parametrize("count", [1, 500])
def test_bins_count_everything(count: int) -> None:
    texts = [text for _, _, text in alone(Histogram(np.linspace(1, 2, count), "x", {}, "candidates"))["points"]]
    assert sum(int(text.split()[0]) for text in texts) == count


def test_bars_are_named() -> None:
    assert alone(Bars(["a", "b"], np.array([1.0, 2.5]), "x"))["texts"] == [["a: 1"], ["b: 2.5"]]
    named = Bars(["a", "b"], np.array([1.0, 2.5]), "x", hover=["a ACD", "b WTC"])
    assert alone(named)["texts"] == [["a ACD: 1"], ["b WTC: 2.5"]]
