"""Panels of pictures: a few kinds that hold data, independent of how they are drawn.

A picture is a list of sheets, one for each protein or target. `static` draws a sheet with matplotlib, `page` as a part
of a web page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ENTROPY = (0.0, math.log2(20))
"""Ends of an axis of entropies over 20 residues, bits."""


@dataclass(frozen=True, eq=False)
class Heatmap:
    """Values as colours.

    Attributes:
        values: [rows, columns]; NaN where there is none.
        rows: label of each row, from top to bottom.
        columns: label of each column; the numbers of residues where they are positions.
        label: what the colours mean, with the unit.
        x_label: what the columns are.
        y_label: what the rows are.
        centred: whether zero is neutral, and the sides differ.
        limits: values of the outermost colours; None spans the values, without the outermost percent.
        names: what hovering shows for each cell, [rows, columns]; None is row and column.
        letters: printed into the cells, [rows, columns].
        dots: rows and columns of cells that carry a dot.
        missing: whether cells without a value are marked; else they are empty.
    """

    values: Array
    rows: Sequence[str]
    columns: Sequence[int | str]
    label: str
    x_label: str
    y_label: str = ""
    centred: bool = False
    limits: tuple[float, float] | None = None
    names: Sequence[Sequence[str]] | None = None
    letters: Sequence[Sequence[str]] | None = None
    dots: Sequence[tuple[int, int]] = ()
    missing: bool = True

    @property
    def range(self) -> tuple[float, float]:
        """`limits`, or those of most values."""
        if self.limits is not None:
            return self.limits
        known = self.values[np.isfinite(self.values)]
        if not len(known):
            return (-1.0, 1.0) if self.centred else (0.0, 1.0)
        if self.centred:
            most = float(np.quantile(np.abs(known), 0.99)) or 1.0
            return -most, most
        low, high = (float(np.quantile(known, q)) for q in (0.005, 0.995))
        return (low, high) if low < high else (low - 0.5, low + 0.5)


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines over one axis.

    Attributes:
        x: values, or the labels of columns of the other tracks.
        series: by name, as many values; NaN leaves a gap.
        x_label: what they lie over, with the unit.
        y_label: what they are, with the unit.
        filled: whether the space to zero is filled; for one line, among tracks.
        log_y: whether the axis is logarithmic.
        markers: whether points are marked.
        limits: ends of the axis; None fits the values.
    """

    x: Sequence[float | int | str]
    series: Mapping[str, Array]
    x_label: str
    y_label: str
    filled: bool = False
    log_y: bool = False
    markers: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Logo:
    """Letters stacked by frequency.

    Attributes:
        frequencies: of the residues, [positions, 20] in `RESIDUE_ORDER`; rows add up to 1.
        y_label: what the heights mean.
    """

    frequencies: Array
    y_label: str


@dataclass(frozen=True, eq=False)
class Scatter:
    """Points.

    Attributes:
        x: of each point.
        y: of each point.
        names: shown by hovering.
        x_label: with the unit.
        y_label: with the unit.
        title: above the panel.
        diagonal: whether a line marks where both are equal.
        labels: names printed beside points, by index.
        log_y: whether the axis is logarithmic.
    """

    x: Array
    y: Array
    names: Sequence[str]
    x_label: str
    y_label: str
    title: str = ""
    diagonal: bool = False
    labels: Mapping[int, str] = field(default_factory=dict)
    log_y: bool = False


@dataclass(frozen=True, eq=False)
class Histogram:
    """A distribution.

    Attributes:
        values: finite.
        x_label: what they are, with the unit.
        marks: values that a line marks, by name.
        noun: of what is counted, in the plural.
    """

    values: Array
    x_label: str
    marks: Mapping[str, float] = field(default_factory=dict)
    noun: str = "values"


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars from left to right, one below the other.

    Attributes:
        names: from top to bottom.
        values: of each bar.
        x_label: with the unit.
        title: above the panel.
        hover: what hovering shows of each; empty is its name.
    """

    names: Sequence[str]
    values: Array
    x_label: str
    title: str = ""
    hover: Sequence[str] = ()


Panel = Heatmap | Lines | Logo | Scatter | Histogram | Bars


@dataclass(frozen=True, eq=False)
class Tracks:
    """Panels that share their columns, one above the other: the positions of a protein.

    Attributes:
        panels: heat maps, logos, and lines whose `x` are the columns.
        columns: numbers of the positions, ascending; some may be left out.
        letters: residue at each; empty where there is none.
    """

    panels: Sequence[Heatmap | Lines | Logo]
    columns: Sequence[int]
    letters: Sequence[str]

    @property
    def breaks(self) -> list[int]:
        """Indices of the columns before which positions are left out."""
        return [index for index in range(1, len(self.columns)) if self.columns[index] != self.columns[index - 1] + 1]


@dataclass(frozen=True, eq=False)
class Table:
    """The numbers behind a sheet, for a web page.

    Attributes:
        columns: their names.
        rows: values; text, numbers or None.
        position: name of the column whose numbers are columns of the tracks; None for none.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    position: str | None = None


@dataclass(frozen=True, eq=False)
class Sheet:
    """One page of a picture.

    Attributes:
        title: what it shows.
        caption: what it was computed with, and how to read it.
        layout: tracks across the page, or panels beside each other.
        table: the numbers; None for none.
        summary: whether it shows all that the sheets after it show one by one.
    """

    title: str
    caption: str
    layout: Sequence[Tracks | Sequence[Panel]]
    table: Table | None = None
    summary: bool = False
