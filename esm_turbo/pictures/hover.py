"""Texts that a web page shows under the mouse, for the panels of a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from esm_turbo.pictures.palettes import RESIDUE_ORDER
from esm_turbo.pictures.panels import Array, Bars, Heatmap, Histogram, Lines, Logo, Scatter
from esm_turbo.pictures.static import PlacedPanel, histogram_bins


def spots(figure: Figure, placed: Sequence[PlacedPanel]) -> list[dict[str, Any]]:
    """Where which text belongs, JSON values; places are shares of the figure from its top left corner.

    Args:
        figure: a figure that was drawn.
        placed: its panels.

    Returns:
        For each panel its `box` (left, top, width, height), and either `texts`, rows of equally large cells, or
        `points`, each with x, y and a text. `columns` are the numbers of its columns, if it is a track.
    """
    return [_spot(figure, one) for one in placed]


def _spot(figure: Figure, placed: PlacedPanel) -> dict[str, Any]:
    axes, panel, positions = placed.axes, placed.panel, placed.positions
    area = axes.get_position()
    width = area.width
    if positions is not None:
        # The last line may have fewer columns than there is room for.
        width *= len(positions) / abs(axes.get_xlim()[1] - axes.get_xlim()[0])
    spot: dict[str, Any] = {"box": [area.x0, 1 - area.y1, width, area.height]}
    if positions is not None:
        spot["columns"] = list(positions)
    if isinstance(panel, Heatmap):
        columns = range(len(panel.columns))[placed.part]
        spot["texts"] = [[_cell(panel, row, column) for column in columns] for row in range(len(panel.rows))]
    elif isinstance(panel, Logo):
        shares = panel.frequencies[placed.part]
        spot["texts"] = [[f"{at}: {_residues(own)}" for at, own in zip(positions or (), shares, strict=True)]]
    elif isinstance(panel, Bars):
        spot["texts"] = [
            [f"{name}: {value:.4g}"] for name, value in zip(panel.hover or panel.names, panel.values, strict=True)
        ]
    else:
        transform = axes.transData - figure.transFigure
        places = [(*transform.transform((x, y)), text) for x, y, text in _points(panel, placed)]
        spot["points"] = [[float(x), 1 - float(y), text] for x, y, text in places if np.isfinite((x, y)).all()]
    return spot


def _cell(panel: Heatmap, row: int, column: int) -> str:
    value = panel.values[row, column]
    name = f"{panel.rows[row]}, {panel.columns[column]}" if panel.names is None else panel.names[row][column]
    return f"{name}: {value:.3f}" if np.isfinite(value) else ""


def _residues(shares: Array) -> str:
    """The residues of a position by their shares."""
    order = np.argsort(-shares, kind="stable")
    return ", ".join(f"{RESIDUE_ORDER[index]} {shares[index]:.0%}" for index in order if shares[index] > 0)


def _points(panel: Lines | Scatter | Histogram, placed: PlacedPanel) -> Iterator[tuple[float, float, str]]:
    """Finite points in data coordinates, and their texts."""
    if isinstance(panel, Scatter):
        for x, y, name in zip(panel.x, panel.y, panel.names, strict=True):
            yield float(x), float(y), f"{name}: {x:.4g}, {y:.4g}"
    elif isinstance(panel, Histogram):
        edges = histogram_bins(panel.values)
        counts, _ = np.histogram(panel.values, edges)
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
            yield float(left + right) / 2, float(count), f"{count} {panel.noun} from {left:.3g} to {right:.3g}"
    else:
        by_index = placed.positions is not None or isinstance(panel.x[0], str)
        for name, values in panel.series.items():
            for index in range(len(panel.x))[placed.part]:
                if np.isfinite(values[index]):
                    text = f"{panel.x[index]}, {name}: {values[index]:.4g}"
                    yield float(index if by_index else panel.x[index]), float(values[index]), text
