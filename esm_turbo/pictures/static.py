"""Draw sheets with matplotlib.

Pages grow with what they show, so that a long protein makes a longer picture and not smaller letters; matplotlib's
constrained layout makes room for labels.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Bbox

from esm_turbo.files.safe_text import visible
from esm_turbo.pictures.palettes import DIVERGING, INK, MISSING, MUTED, RESIDUE_COLOURS, SEQUENTIAL, SERIES
from esm_turbo.pictures.panels import Bars, Heatmap, Histogram, Lines, Logo, Panel, Scatter, Sheet, Tracks

STYLE: dict[Any, Any] = {
    # Searchable text, and the same ids in every run.
    "svg.fonttype": "none",
    "svg.hashsalt": "esm_turbo",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}

# Inches.
_WIDTH, _LABELS, _EDGE = 11.0, 2.0, 0.25
_ROW, _PANEL, _AXIS, _PAD = 0.125, 3.1, 0.9, 0.12
_CELL_LEAST, _CELL_MOST, _LETTER_MOST = 0.085, 0.3, 0.5
_CHARACTER = 0.078
# Of a page of short tracks alone; and of a character of a position, and the space around it.
_NARROW, _DIGIT, _AROUND = 7.5, 0.075, 0.06
# Columns of a heat map with upright names at most.
_UPRIGHT = 100
# Characters of a name beside a bar or a row, of the title, and of a line of the caption.
_NAME, _TITLE, _CAPTION = 30, 80, 170


@dataclass(frozen=True, eq=False)
class PlacedPanel:
    """A panel, or some columns of one, in its axes.

    Attributes:
        axes: where it is drawn.
        panel: the whole panel.
        part: of its columns, by their indices.
        positions: numbers of these columns; None if it is not among tracks.
    """

    axes: Axes
    panel: Panel
    part: slice
    positions: Sequence[int] | None = None


def figure(sheet: Sheet) -> Figure:
    """Draw a sheet with its title and its caption."""
    return drawn_sheet(sheet)[0]


def drawn_sheet(sheet: Sheet, *, head: bool = True) -> tuple[Figure, list[PlacedPanel]]:
    """Draw a sheet.

    Args:
        sheet: the sheet.
        head: whether with its title and its caption.

    Returns:
        The figure, and its panels in the order in which they are drawn.
    """
    with rc_context(STYLE):
        width = _page_width(sheet)
        caption = textwrap.wrap(_text(sheet.caption), int(_CAPTION * width / _WIDTH)) if head else []
        top = 0.62 + 0.17 * len(caption) if head else 0.0
        heights = [_tracks_height(row) if isinstance(row, Tracks) else _row_height(row) for row in sheet.layout]
        height = top + sum(heights)
        engine = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - top / height), w_pad=_PAD, h_pad=0.05, hspace=0, wspace=0)
        drawn = Figure(figsize=(width, height), facecolor="white", layout=engine)
        grid = drawn.add_gridspec(len(heights), 1, height_ratios=heights)
        placed: list[PlacedPanel] = []
        for number, row in enumerate(sheet.layout):
            draw: Any = _tracks if isinstance(row, Tracks) else _beside
            placed += draw(drawn, grid[number], row)
        if head:
            title = _shortened(sheet.title, int(_TITLE * width / _WIDTH))
            drawn.text(_EDGE / width, 1 - 0.36 / height, title, fontsize=13, fontweight="bold", va="baseline")
            text = "\n".join(caption)
            drawn.text(_EDGE / width, 1 - 0.5 / height, text, fontsize=8, color=MUTED, va="top", linespacing=1.35)
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")
        for axes in drawn.axes:
            # The solver's last digits differ from run to run.
            axes.set_position(np.round(axes.get_position().bounds, 5).tolist())
        for one in placed:
            if isinstance(one.panel, Scatter):
                _point_labels(one.axes, one.panel)
    return drawn, placed


def _tracks(drawn: Figure, place: SubplotSpec, tracks: Tracks) -> list[PlacedPanel]:
    """Tracks, broken into several lines where they are long."""
    lines, per_line, cell = _broken(tracks)
    heights = [_track_height(panel) for panel in tracks.panels]
    width = cell * per_line
    widths = (width, max(0.01, drawn.get_figwidth() - _LABELS - width))
    grid = place.subgridspec(lines * len(heights), 2, height_ratios=heights * lines, width_ratios=widths)
    placed = []
    for line in range(lines):
        begin, end = line * per_line, min(len(tracks.columns), (line + 1) * per_line)
        gaps = [index for index in tracks.breaks if begin < index < end]
        for number, (panel, height) in enumerate(zip(tracks.panels, heights, strict=True)):
            axes = drawn.add_subplot(grid[line * len(heights) + number, 0])
            placed.append(PlacedPanel(axes, panel, slice(begin, end), tracks.columns[begin:end]))
            if isinstance(panel, Heatmap):
                image = _heat(axes, panel, begin, end)
                for index in gaps:
                    axes.axvline(index - 0.5, color="white", linewidth=2.5)
                if line == 0:
                    _colour_bar(image, panel, width, height)
            elif isinstance(panel, Logo):
                _logo(axes, panel, begin, end)
            else:
                _track_lines(axes, panel, [begin, *gaps, end], line == 0)
            # Columns of all lines are equally wide.
            axes.set_xlim(begin - 0.5, begin + per_line - 0.5)
            axes.set_xticks([])
        _positions(axes, tracks, begin, end, cell, "position" if line == lines - 1 else "")
    return placed


def _tracks_height(tracks: Tracks) -> float:
    lines, _, _ = _broken(tracks)
    return lines * (sum(map(_track_height, tracks.panels)) + 0.1 * len(tracks.panels) + _AXIS)


def _broken(tracks: Tracks) -> tuple[int, int, float]:
    """Number of lines of tracks, columns of each, and width of a column."""
    usable, count = _WIDTH - _LABELS, len(tracks.columns)
    lines = max(1, math.ceil(count / (usable / _CELL_LEAST)))
    per_line = math.ceil(count / lines)
    most = _LETTER_MOST if any(isinstance(panel, Logo) for panel in tracks.panels) else _CELL_MOST
    return lines, per_line, min(most, usable / per_line)


def _page_width(sheet: Sheet) -> float:
    """As wide as tracks need; panels beside each other use the whole page."""
    widths = [_NARROW]
    for row in sheet.layout:
        if not isinstance(row, Tracks):
            return _WIDTH
        _, per_line, cell = _broken(row)
        widths.append(_LABELS + per_line * cell)
    return max(widths)


def _track_height(panel: Heatmap | Lines | Logo) -> float:
    if isinstance(panel, Heatmap):
        return max(0.3, _ROW * len(panel.rows))
    return 1.1 if isinstance(panel, Logo) else 0.55


def _positions(axes: Axes, tracks: Tracks, begin: int, end: int, cell: float, label: str) -> None:
    """Letters and numbers below the last track."""
    at, upright = _ticks(tracks.columns[begin:end], cell)
    axes.set_xticks([begin + index for index in at], [str(tracks.columns[begin + index]) for index in at])
    if upright:
        axes.tick_params(axis="x", labelrotation=90, labelsize=7)
    axes.tick_params(axis="x", length=0, pad=13 if any(tracks.letters) else 4)
    place = axes.get_xaxis_transform()
    for index in range(begin, end):
        axes.annotate(tracks.letters[index], (index, 0), (0, -8), xycoords=place, textcoords="offset points",
                      ha="center", va="center", fontsize=6.5, color=MUTED).set_in_layout(False)  # fmt: skip
    axes.set_xlabel(label, labelpad=3)


def _ticks(columns: Sequence[int], cell: float | None = None) -> tuple[list[int], bool]:
    """Round positions, all of a short protein, and those that follow positions left out.

    Args:
        columns: the numbers.
        cell: width of a column, inches; what would touch is left out. None leaves nothing out.

    Returns:
        Their indices, and whether their labels are turned for lack of room.
    """
    step = 1 if len(columns) <= 20 else 5 if len(columns) <= 60 else 10
    first = [i for i, column in enumerate(columns) if i == 0 or column != columns[i - 1] + 1]
    wanted = [index for index, column in enumerate(columns) if column % step == 0]
    # A protein that is shown as a whole needs no number at its beginning.
    wanted = [*first, *wanted] if len(first) > 1 or not wanted else wanted
    widths = [_DIGIT * len(str(column)) + _AROUND for column in columns]
    at = wanted if cell is None else _apart(wanted, widths, cell)
    upright = cell is not None and len(first) > 1 and not {*first} <= {*at}
    if cell is not None and upright:
        at = _apart(wanted, [_CELL_LEAST] * len(columns), cell)
    return sorted({*at}), upright


def _apart(wanted: Sequence[int], widths: Sequence[float], cell: float) -> list[int]:
    """Those of the wanted columns whose labels do not touch, the first of them first."""
    chosen: list[int] = []
    for index in wanted:
        if all(abs(index - other) * cell >= (widths[index] + widths[other]) / 2 for other in chosen):
            chosen.append(index)
    return chosen


def _heat(axes: Axes, panel: Heatmap, begin: int = 0, end: int | None = None) -> Any:
    values = panel.values[:, begin:end]
    low, high = panel.range
    missing = MISSING if panel.missing else "white"
    colours = colormaps[DIVERGING if panel.centred else SEQUENTIAL].with_extremes(bad=missing)
    xs, ys = begin + np.arange(values.shape[1] + 1) - 0.5, np.arange(values.shape[0] + 1) - 0.5
    # As a picture in the picture, since tens of thousands of rectangles make slow files.
    image = axes.pcolormesh(xs, ys, np.ma.masked_invalid(values), cmap=colours, norm=Normalize(low, high),
                            rasterized=True)  # fmt: skip
    axes.set_ylim(values.shape[0] - 0.5, -0.5)
    if len(panel.rows) <= 60:
        names = [_shortened(row, _NAME) for row in panel.rows]
        axes.set_yticks(range(len(names)), names, fontsize=8 if end is None else 6.5)
    axes.tick_params(axis="y", length=0, pad=3)
    axes.spines[:].set_visible(False)
    axes.set_ylabel(panel.y_label)
    dots = [(row, column) for row, column in panel.dots if begin <= column < xs[-1]]
    if dots:
        rows, columns = zip(*dots, strict=True)
        axes.plot(columns, rows, linestyle="", marker="o", markersize=1.9, color=INK)
    for row, letters in enumerate(panel.letters or ()):
        for column, letter in enumerate(letters):
            value = panel.values[row, column]
            dark = np.isfinite(value) and (value - low) / (high - low) < 0.5 and not panel.centred
            axes.text(column, row, letter, ha="center", va="center", fontsize=7.5, color="white" if dark else INK,
                      in_layout=False)  # fmt: skip
    return image


def _colour_bar(image: Any, panel: Heatmap, width: float, height: float) -> None:
    """The scale beside a heat map of about this size, inches."""
    axes = image.axes
    long = min(height, 2.4)
    low, high = panel.range
    known = panel.values[np.isfinite(panel.values)]
    beyond = (bool(len(known)) and known.min() < low, bool(len(known)) and known.max() > high)
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(beyond, "neither")
    bar = axes.figure.colorbar(image, ax=axes, extend=extend, aspect=long / 0.1, shrink=long / height, anchor=(0, 1),
                               panchor=False, fraction=0.15 / width, pad=0.12 / width)  # fmt: skip
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=7.5)
    bar.locator = MaxNLocator(5 if height > 1 else 2)
    bar.update_ticks()
    if height > 1:
        bar.set_label(panel.label, fontsize=8)
    else:
        # Beside a low bar it would reach beyond the page.
        axes.set_title(panel.label, loc="left")


def _track_lines(axes: Axes, panel: Lines, ends: Sequence[int], legend: bool) -> None:
    """Lines over the columns from the first to the last end, in a piece from each end to the next."""
    for colour, (name, values) in zip(cycle(SERIES), panel.series.items()):
        for begin, end in pairwise(ends):
            part, edges = values[begin:end], np.arange(begin, end + 1) - 0.5
            if panel.filled:
                axes.stairs(part, edges, fill=True, color=colour, alpha=0.35, linewidth=0)
            label = name if begin == ends[0] else None
            axes.stairs(part, edges, baseline=None, color=colour, linewidth=0.9, label=label)
    _limits(axes, panel)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))
    axes.set_ylabel(panel.y_label, rotation=0, ha="right", va="center", fontsize=7.5)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines["bottom"].set_visible(False)
    if legend and len(panel.series) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(1, 0), fontsize=7, handlelength=1.2)


def _limits(axes: Axes, panel: Lines) -> None:
    """Limits of all parts of a broken line."""
    known = np.concatenate([values[np.isfinite(values)] for values in panel.series.values()])
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    low, high = panel.limits or ((min(low, 0.0), max(high, 0.0)) if panel.filled else (low, high))
    margin = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - margin * (low != 0), high + margin * (high != 0))
    if low < 0 < high:
        axes.axhline(0, color=MUTED, linewidth=0.6)


def _logo(axes: Axes, panel: Logo, begin: int, end: int) -> None:
    from logomaker import Logo as DrawnLogo
    from pandas import DataFrame

    frame = DataFrame(panel.frequencies[begin:end], columns=list(RESIDUE_COLOURS), index=range(begin, end))
    DrawnLogo(frame, ax=axes, color_scheme=dict(RESIDUE_COLOURS), font_name="DejaVu Sans", vpad=0.02)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1])
    axes.set_ylabel(panel.y_label, fontsize=8)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _beside(drawn: Figure, place: SubplotSpec, panels: Sequence[Panel]) -> list[PlacedPanel]:
    """Panels beside each other; those with rows are as tall as these need."""
    shares = [2.0 if isinstance(panel, Heatmap) else 1.0 for panel in panels]
    usable = drawn.get_figwidth() - len(panels) - 2 * _has_legend(panels[-1])
    widths = [usable * share / sum(shares) for share in shares]
    widths = [
        min(width, 0.24 * len(panel.columns)) if isinstance(panel, Heatmap) else width
        for panel, width in zip(panels, widths, strict=True)
    ]
    if len(panels) == 1 and not isinstance(panels[0], Heatmap | Bars):
        widths = [min(usable, 6.5)]
    height = _panels_height(panels)
    grid = place.subgridspec(1, len(panels) + 1, width_ratios=[*widths, max(0.01, usable - sum(widths))])
    placed = []
    for number, (panel, width) in enumerate(zip(panels, widths, strict=True)):
        own = _panel_height(panel) if isinstance(panel, Heatmap | Bars) else height
        spot = grid[number]
        if own < height:
            spot = spot.subgridspec(2, 1, height_ratios=(own, height - own))[0]
        axes = drawn.add_subplot(spot)
        placed.append(PlacedPanel(axes, panel, slice(None)))
        axes.set_title(_wrapped(getattr(panel, "title", ""), width), loc="left")
        image = _DRAW[type(panel)](axes, panel)
        if panel is panels[-1] and _has_legend(panel):
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
        if isinstance(panel, Heatmap):
            _heat_ticks(axes, panel)
            _colour_bar(image, panel, width, own)
    return placed


def _panels_height(panels: Sequence[Panel]) -> float:
    return max(map(_panel_height, panels))


def _row_height(panels: Sequence[Panel]) -> float:
    """Height with labels and titles, inches."""
    names = [name for panel in panels if isinstance(panel, Heatmap) for name in _column_names(panel)]
    title = max(getattr(panel, "title", "").count("\n") for panel in panels)
    return _panels_height(panels) + 0.16 * title + _AXIS + _DIGIT * max(map(len, names), default=0)


def _has_legend(panel: Panel) -> bool:
    """True if the last panel of a row explains the colours of all."""
    return isinstance(panel, Lines) and len(panel.series) > 1


def _panel_height(panel: Panel) -> float:
    rows = len(panel.rows) if isinstance(panel, Heatmap) else len(panel.names) if isinstance(panel, Bars) else 0
    return max(0.6, 0.2 * rows) if rows else _PANEL


def _column_names(panel: Heatmap) -> list[str]:
    """Names below the columns of a heat map, where these have no numbers and there is room."""
    if len(panel.columns) > _UPRIGHT or all(isinstance(column, int) for column in panel.columns):
        return []
    return [_shortened(str(column), _NAME) for column in panel.columns]


def _heat_ticks(axes: Axes, panel: Heatmap) -> None:
    numbers = [column for column in panel.columns if isinstance(column, int)]
    if len(numbers) == len(panel.columns):
        at, _ = _ticks(numbers)
        axes.set_xticks(at, [str(numbers[index]) for index in at])
    elif len(panel.columns) <= _UPRIGHT:
        axes.set_xticks(range(len(panel.columns)), _column_names(panel), rotation=90, fontsize=6.5)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(panel.x_label)


def _lines(axes: Axes, panel: Lines) -> None:
    numeric = not isinstance(panel.x[0], str) if len(panel.x) else True
    x: Any = panel.x if numeric else range(len(panel.x))
    for colour, (name, values) in zip(cycle(SERIES), panel.series.items()):
        axes.plot(
            x, values, color=colour, linewidth=1.2, marker="o" if panel.markers else None, markersize=4, label=name
        )
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_y:
        _log_ticks(axes)
    if not numeric:
        axes.set_xticks(range(len(panel.x)), [_shortened(str(one), 14) for one in panel.x])
    elif panel.markers and len(panel.x) <= 8:
        axes.set_xticks(list(panel.x), [f"{one:g}" for one in panel.x])
        axes.minorticks_off()
    axes.grid(alpha=0.25)


def _scatter(axes: Axes, panel: Scatter) -> None:
    size = 9.0 if len(panel.x) > 300 else 20.0
    options: dict[str, Any] = {"s": size, "linewidths": 0, "alpha": 0.55 if len(panel.x) > 300 else 0.85}
    axes.scatter(panel.x, panel.y, color=SERIES[0], **options)
    if panel.diagonal:
        _diagonal(axes, panel)
    if panel.log_y:
        _log_ticks(axes)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(alpha=0.25)


def _log_ticks(axes: Axes) -> None:
    """A logarithmic axis with labels, also where it spans less than a decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    for steps in ((1,), (1, 2, 5), range(1, 10)):
        at = [x for x in LogLocator(subs=steps, numticks=100).tick_values(low, high) if low <= x <= high]
        if len(at) > 2:
            break
    else:
        at = [x for x in MaxNLocator(4).tick_values(low, high) if low <= x <= high]
    at = at[:: math.ceil(len(at) / 8)]
    axes.set_yticks(at, [f"{x:.4g}" for x in at])
    axes.minorticks_off()
    axes.set_ylim(low, high)


def _point_labels(axes: Axes, panel: Scatter) -> None:
    """Names beside points, each where it covers no earlier one; one that would is left to the mouse."""
    size, taken = 7.5, list[Bbox]()
    for index, name in panel.labels.items():
        shown = _shortened(name, _NAME)
        # Points of the page, in which text is measured, too.
        x, y = axes.transData.transform((panel.x[index], panel.y[index])) * 72 / axes.figure.dpi
        width = 0.62 * size * len(shown)
        for dx, dy in ((4, 3), (4, -9), (-4 - width, 3), (-4 - width, -9), (4, 12), (4, -18)):
            box = Bbox.from_bounds(x + dx, y + dy, width, size)
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                axes.annotate(shown, (panel.x[index], panel.y[index]), (dx, dy), textcoords="offset points",
                              fontsize=size)  # fmt: skip
                break


def _diagonal(axes: Axes, panel: Scatter) -> None:
    both = np.concatenate([panel.x, panel.y])
    axes.plot([both.min(), both.max()], [both.min(), both.max()], color=MUTED, linewidth=0.8, linestyle="--", zorder=0)


def _histogram(axes: Axes, panel: Histogram) -> None:
    axes.hist(
        panel.values, bins=histogram_bins(panel.values).tolist(), color=SERIES[5], edgecolor="white", linewidth=0.4
    )
    for colour, (name, value) in zip(cycle((SERIES[1], SERIES[0])), panel.marks.items()):
        axes.axvline(value, color=colour, linewidth=1.3, label=f"{name}: {number_text(value)}")
    axes.set(xlabel=panel.x_label, ylabel=panel.noun)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if panel.marks:
        # Above, since a line may be anywhere.
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)


def histogram_bins(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Edges of the bins of a distribution."""
    return np.histogram_bin_edges(values, bins=min(60, max(5, math.ceil(2 * len(values) ** (1 / 3)))))


def _bars(axes: Axes, panel: Bars) -> None:
    at = range(len(panel.names))
    drawn = axes.barh(at, panel.values, color=SERIES[0], height=0.72)
    axes.bar_label(drawn, labels=list(map(number_text, panel.values)), padding=2, fontsize=7.5)
    axes.set_yticks(at, [_shortened(name, _NAME) for name in panel.names])
    axes.set_ylim(len(panel.names) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(panel.x_label)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.spines["left"].set_visible(False)


_DRAW: dict[type, Callable[[Axes, Any], Any]] = {
    Heatmap: _heat,
    Lines: _lines,
    Scatter: _scatter,
    Histogram: _histogram,
    Bars: _bars,
}


def number_text(value: float) -> str:
    """A number of a label: three digits, or all of a large whole one."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def _text(text: str) -> str:
    """Text as it is, without what matplotlib would take for the beginning of a formula."""
    return visible(" ".join(text.split())).replace("$", "\\$")


def _wrapped(title: str, width: float) -> str:
    """A title in lines that are as wide as its panel at most, inches."""
    lines = [textwrap.wrap(line, max(20, int(width / _CHARACTER))) for line in title.splitlines()]
    return "\n".join(_text(part) for parts in lines for part in parts)


def _shortened(text: str, most: int) -> str:
    shown = visible(" ".join(text.split()))
    return (shown if len(shown) <= most else shown[: most - 1] + "…").replace("$", "\\$")
