"""Draw panels with plotly, for a web page: they answer to the mouse."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from plotly import graph_objects as go

from esm_turbo.files.safe_text import visible
from esm_turbo.pictures.palettes import DIVERGING, INK, MISSING, MUTED, RESIDUE_COLOURS, SEQUENTIAL, SERIES
from esm_turbo.pictures.panels import Array, Bars, Heatmap, Histogram, Lines, Logo, Panel, Scatter, Tracks
from esm_turbo.pictures.static import histogram_bins, number_text

# Pixels.
_ROW, _TRACK, _LOGO, _BETWEEN = 17, 70, 150, 14
_TOP, _BOTTOM, _SIDE = 34, 64, 90
_CELL_MOST, _LETTER_MOST, _NARROW = 30, 60, 300
_GRID = "#ececec"
_LOG = {"type": "log", "exponentformat": "power", "dtick": 1}
# Characters of a name beside a bar or a row.
_NAME = 32


def tracks_figure(tracks: Tracks) -> go.Figure:
    """Panels above each other whose positions move together."""
    heights = [_track_height(panel) for panel in tracks.panels]
    inner = sum(heights) + _BETWEEN * (len(heights) - 1)
    # By index, since positions may leave others out.
    at = list(range(len(tracks.columns)))
    figure = go.Figure()
    top = inner
    for number, (panel, height) in enumerate(zip(tracks.panels, heights, strict=True), start=1):
        axis = "" if number == 1 else str(number)
        domain = [(top - height) / inner, top / inner]
        options: dict[str, Any] = {"domain": domain, "anchor": "x", "zeroline": False, "gridcolor": _GRID}
        if isinstance(panel, Heatmap):
            trace = _heat_trace(panel, at)
            trace.update(yaxis=f"y{axis}", colorbar=_bar(panel, domain, 0.97))
            figure.add_trace(trace)
            figure.add_traces([missing.update(yaxis=f"y{axis}") for missing in _missing_traces(panel, at)])
            figure.add_trace(_dots(panel, f"y{axis}"))
            for index in tracks.breaks:
                figure.add_shape(_gap(index, domain))
            options |= _rows(panel) | {"fixedrange": True}
        elif isinstance(panel, Logo):
            _add_logo(figure, panel, f"y{axis}")
            options |= {"range": [0, 1.02], "title": panel.y_label, "fixedrange": True, "tickvals": [0, 0.5, 1]}
        else:
            if panel.filled:
                figure.add_traces([_area(values, at, f"y{axis}") for values in panel.series.values()])
            for trace in _step_traces(panel, tracks.breaks):
                trace.update(yaxis=f"y{axis}", showlegend=len(panel.series) > 1)
                figure.add_trace(trace)
            options |= {"title": _broken(panel.y_label), "fixedrange": True, "nticks": 4}
            options |= {"rangemode": "tozero"} if panel.filled else {}
            options |= {"range": panel.limits} if panel.limits else {}
        figure.update_layout({f"yaxis{axis}": options | {"title": {"text": options["title"], "font": {"size": 11}}}})
        top -= height + _BETWEEN
    ends = [-0.5, len(at) - 0.5]
    last = "y" if len(heights) == 1 else f"y{len(heights)}"
    figure.update_layout(
        height=inner + _TOP + _BOTTOM,
        barmode="stack",
        bargap=0,
        xaxis={
            "anchor": last,
            "range": ends,
            "minallowed": ends[0],
            "maxallowed": ends[1],
            "title": "position",
            "showgrid": False,
            "zeroline": False,
            "showspikes": True,
            "spikemode": "across",
            "spikethickness": 1,
            "spikecolor": MUTED,
        },
        margin={"l": _SIDE, "r": _SIDE, "t": _TOP, "b": _BOTTOM},
        legend={"orientation": "h", "x": 0, "y": -0.09, "yanchor": "top"},
        meta={"positions": list(tracks.columns), "letters": list(tracks.letters)},
    )
    return _styled(figure)


def tracks_width(tracks: Tracks) -> int:
    """Pixels beyond which columns of tracks would only be broad."""
    most = _LETTER_MOST if any(isinstance(panel, Logo) for panel in tracks.panels) else _CELL_MOST
    return max(_NARROW, 2 * _SIDE + most * len(tracks.columns))


def panel_figure(panel: Panel) -> go.Figure:
    """A panel by itself."""
    figure = go.Figure()
    figure.update_layout(margin={"l": 70, "r": 30, "t": 48, "b": 60}, height=440)
    _DRAW[type(panel)](figure, panel)
    return _styled(figure)


def _track_height(panel: Heatmap | Lines | Logo) -> int:
    if isinstance(panel, Heatmap):
        return max(40, _ROW * len(panel.rows))
    return _LOGO if isinstance(panel, Logo) else _TRACK


def _styled(figure: go.Figure) -> go.Figure:
    figure.update_layout(
        template="none",
        paper_bgcolor="white",
        plot_bgcolor="white",
        font={
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
            "size": 12,
            "color": INK,
        },
        hoverlabel={"bgcolor": "white", "font": {"color": INK}},
        dragmode="zoom",
    )
    return figure


def _heat_trace(panel: Heatmap, columns: Sequence[Any]) -> go.Heatmap:
    low, high = panel.range
    names = panel.names or [[f"{row}, {column}" for column in panel.columns] for row in panel.rows]
    return go.Heatmap(
        z=_plain(panel.values),
        x=columns,
        y=list(range(len(panel.rows))),
        zmin=low,
        zmax=high,
        zmid=0 if panel.centred else None,
        colorscale=DIVERGING if panel.centred else SEQUENTIAL,
        customdata=[_names(row) for row in names],
        hovertemplate=f"<b>%{{customdata}}</b><br>{_safe(panel.label)} %{{z:.3f}}<extra></extra>",
        hoverongaps=False,
        xgap=0.5 if len(columns) < 400 else 0,
        ygap=0.5,
    )


def _missing_traces(panel: Heatmap, columns: Sequence[Any]) -> list[go.Heatmap]:
    """The cells without a value, in grey, if there are any to be marked."""
    missing = ~np.isfinite(panel.values)
    if not (panel.missing and missing.any()):
        return []
    grey = [[1 if cell else None for cell in row] for row in missing]
    colours = [[0, MISSING], [1, MISSING]]
    rows = list(range(len(panel.rows)))
    return [go.Heatmap(z=grey, x=columns, y=rows, colorscale=colours, showscale=False, hoverinfo="skip")]


def _bar(panel: Heatmap, domain: Sequence[float], share: float) -> dict[str, Any]:
    middle, size = (domain[0] + domain[1]) / 2, domain[1] - domain[0]
    title = {"text": _broken(panel.label), "side": "right", "font": {"size": 11}}
    return {"title": title, "y": middle, "len": share * size, "thickness": 12, "x": 1.01, "outlinewidth": 0}


def _rows(panel: Heatmap) -> dict[str, Any]:
    """The axis of a heat map's rows. By number, since names may be equal."""
    names = [_short(row) for row in panel.rows]
    at = list(range(len(names)))
    return {
        "range": [len(names) - 0.5, -0.5],
        "tickvals": at,
        "ticktext": names,
        "title": panel.y_label,
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
    }


def _dots(panel: Heatmap, axis: str) -> go.Scatter:
    return go.Scatter(
        x=[column for _, column in panel.dots],
        y=[row for row, _ in panel.dots],
        mode="markers",
        marker={"color": INK, "size": 4},
        yaxis=axis,
        showlegend=False,
        customdata=[_safe(f"{panel.rows[row]}{panel.columns[column]}") for row, column in panel.dots],
        hovertemplate="<b>%{customdata}</b>, wild type<extra></extra>",
    )


def _gap(index: int, domain: Sequence[float]) -> dict[str, Any]:
    """The mark for positions omitted before a column."""
    place = {"x0": index - 0.5, "x1": index - 0.5, "xref": "x", "y0": domain[0], "y1": domain[1], "yref": "paper"}
    return {"type": "line", "line": {"color": "white", "width": 4}} | place


def _area(values: Array, at: Sequence[int], axis: str) -> go.Bar:
    """The space from values to zero, as bars: an area would also fill the gaps between them."""
    return go.Bar(
        x=at,
        y=_plain(values),
        yaxis=axis,
        marker={"color": "rgba(0,114,178,0.3)", "line": {"width": 0}},
        hoverinfo="skip",
        showlegend=False,
    )


def _step_traces(panel: Lines, breaks: Sequence[int]) -> list[go.Scatter]:
    """Lines over whole columns, with gaps before some of them and where values are missing."""
    return [
        _line_trace(panel, name, colour, *_steps(panel.x, values, breaks)).update(mode="lines", line_shape="hvh")
        for colour, (name, values) in zip(cycle(SERIES), panel.series.items())
    ]


def _steps(labels: Sequence[Any], values: Array, breaks: Sequence[int]) -> tuple[list[float], list[Any], list[float]]:
    """Places, labels and values; each piece begins and ends at the edge of a column."""
    places: list[float] = []
    columns: list[int] = []
    known = np.isfinite(values)
    for index in np.flatnonzero(known).tolist():
        first = index == 0 or not known[index - 1] or index in breaks
        last = index + 1 == len(values) or not known[index + 1] or index + 1 in breaks
        places += [index - 0.5] * first + [index] + [index + 0.5] * last + [index + 0.5] * last
        columns += [index] * first + [index] + [index] * last + [-1] * last
    drawn = [math.nan if index < 0 else float(values[index]) for index in columns]
    return places, ["" if index < 0 else labels[index] for index in columns], drawn


def _line_traces(panel: Lines, x: Sequence[Any]) -> list[go.Scatter]:
    return [
        _line_trace(panel, name, colour, x, panel.x, values)
        for colour, (name, values) in zip(cycle(SERIES), panel.series.items())
    ]


def _line_trace(
    panel: Lines, name: str, colour: str, x: Sequence[Any], labels: Sequence[Any], values: Array | list[float]
) -> go.Scatter:
    return go.Scatter(
        x=x,
        customdata=list(labels),
        y=_plain(values),
        name=_safe(name),
        mode="lines+markers" if panel.markers or _any_alone(np.asarray(values)) else "lines",
        marker={"size": 6 if panel.markers else 3},
        line={"color": colour, "width": 1.5},
        hovertemplate=f"{_safe(panel.x_label)} %{{customdata}}<br>{_safe(name)} %{{y:.4g}}<extra></extra>",
    )


def _any_alone(values: Array) -> bool:
    """True if a value has no neighbour, so that no line leads to it."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return bool((known[1:-1] & ~known[:-2] & ~known[2:]).any())


def _add_logo(figure: go.Figure, panel: Logo, axis: str) -> None:
    """Letters as outlines, and bars without colour, which answer to the mouse."""
    shapes = []
    for number in range(len(panel.columns)):
        order = np.argsort(panel.frequencies[number], kind="stable")
        base = 0.0
        for index in order:
            height = float(panel.frequencies[number, index])
            if height > 0:
                letter = panel.residues[index]
                path = _outline(letter, number - 0.46, base, 0.92, height)
                colour = RESIDUE_COLOURS[letter]
                shapes.append(
                    {"type": "path", "path": path, "fillcolor": colour, "line": {"width": 0}, "xref": "x", "yref": axis}
                )
            base += height
    figure.update_layout(shapes=shapes)
    for index, residue in enumerate(panel.residues):
        figure.add_trace(
            go.Bar(
                x=list(range(len(panel.columns))),
                y=_plain(panel.frequencies[:, index]),
                customdata=list(panel.columns),
                name=residue,
                marker={"color": "rgba(0,0,0,0)"},
                yaxis=axis,
                showlegend=False,
                hovertemplate=f"<b>{residue}%{{customdata}}</b><br>%{{y:.0%}} of designs<extra></extra>",
            )
        )


def _outline(letter: str, left: float, base: float, width: float, height: float) -> str:
    """A letter that fills a box, as a path of SVG."""
    path = TextPath((0, 0), letter, size=1, prop=FontProperties(family="DejaVu Sans", weight="bold"))
    # What closes a curve has a place of no meaning.
    drawn = path.vertices[path.codes != path.CLOSEPOLY]
    low, high = drawn.min(axis=0), drawn.max(axis=0)
    if letter == "I":  # As wide as others, it would be a block.
        left, width = left + 0.3 * width, 0.4 * width
    scale = np.array([width, height]) / (high - low)
    parts = []
    for vertices, code in path.iter_segments():
        points = (np.reshape(vertices, (-1, 2)) - low) * scale + [left, base]
        numbers = " ".join(f"{x:.3f},{y:.4f}" for x, y in points)
        parts.append({1: "M", 2: "L", 3: "Q", 4: "C"}.get(int(code), "Z") + ("" if code == 79 else numbers))
    return "".join(parts)


def _lines(figure: go.Figure, panel: Lines) -> None:
    for trace in _line_traces(panel, [_safe(x) if isinstance(x, str) else x for x in panel.x]):
        figure.add_trace(trace)
    x: dict[str, Any] = {"title": panel.x_label, "type": "log" if panel.log_x else None, "gridcolor": _GRID}
    if panel.markers and len(panel.x) <= 8 and not isinstance(panel.x[0], str):
        x |= {"tickvals": list(panel.x), "ticktext": [f"{float(one):g}" for one in panel.x]}
    y = {"title": _broken(panel.y_label), "gridcolor": _GRID} | (_LOG if panel.log_y else {})
    figure.update_layout(xaxis=x, yaxis=y, showlegend=len(panel.series) > 1)


def _heat(figure: go.Figure, panel: Heatmap) -> None:
    numbers = all(isinstance(column, int) for column in panel.columns)
    columns = list(panel.columns) if numbers else _names([str(column) for column in panel.columns])
    trace = _heat_trace(panel, columns)
    trace.update(colorbar=_bar(panel, (0, 1), 1))
    if panel.letters is not None:
        width = max(map(len, panel.letters))
        letters = [[*row, *[""] * (width - len(row))] for row in panel.letters]
        trace.update(text=letters, texttemplate="%{text}")
    if panel.square:
        trace.update(y=columns, xgap=0, ygap=0)
        y: dict[str, Any] = {"autorange": "reversed", "title": panel.y_label, "showgrid": False, "zeroline": False}
        y |= {"scaleanchor": "x", "constrain": "domain"}
        figure.update_layout(height=680)
    else:
        y = _rows(panel) | {"automargin": True}
        figure.update_layout(height=max(240, 22 * len(panel.rows) + 110))
    x: dict[str, Any] = {"title": panel.x_label, "showgrid": False, "zeroline": False, "constrain": "domain"}
    if not numbers:
        x |= {"type": "category", "dtick": 1}
    figure.add_trace(trace)
    figure.add_traces([missing.update(y=trace.y) for missing in _missing_traces(panel, columns)])
    figure.update_layout(xaxis=x, yaxis=y, margin={"r": 90})


def _scatter(figure: go.Figure, panel: Scatter) -> None:
    size = 5 if len(panel.x) > 300 else 8
    names = np.array(_names(panel.names), dtype=object)
    labels = np.array([_short(panel.labels.get(index, "")) for index in range(len(panel.x))], dtype=object)
    x_label, y_label = _safe(panel.x_label), _safe(panel.y_label)
    hover = f"<b>%{{customdata}}</b><br>{x_label} %{{x:.4g}}<br>{y_label} %{{y:.4g}}<extra></extra>"

    def points(chosen: Any, **options: Any) -> go.Scatter:
        plot = go.Scattergl if len(panel.x) > 2000 else go.Scatter
        return plot(
            x=_plain(panel.x[chosen]),
            y=_plain(panel.y[chosen]),
            customdata=names[chosen].tolist(),
            text=labels[chosen].tolist(),
            textposition="top right",
            textfont={"size": 11},
            mode="markers+text" if panel.labels else "markers",
            hovertemplate=hover,
            **({} if plot is go.Scattergl else {"cliponaxis": False}),
            **options,
        )

    everything = np.ones(len(panel.x), dtype=bool)
    if panel.groups is None:
        marker = {"color": SERIES[0], "size": size, "opacity": 0.55 if size == 5 else 0.85}
        figure.add_trace(points(everything, marker=marker, showlegend=False))
    elif isinstance(panel.groups, np.ndarray):
        bar = {"title": _safe(panel.group_label), "thickness": 12}
        marker = {"color": _plain(panel.groups), "colorscale": SEQUENTIAL, "size": size, "colorbar": bar}
        figure.add_trace(points(everything, marker=marker, showlegend=False))
    else:
        symbols = ("circle", "square", "diamond", "triangle-down", "triangle-up", "cross")
        for index, group in enumerate(dict.fromkeys(panel.groups)):
            chosen = np.array([one == group for one in panel.groups])
            symbol = symbols[index // len(SERIES) % len(symbols)]
            marker = {"color": SERIES[index % len(SERIES)], "size": size, "symbol": symbol}
            figure.add_trace(points(chosen, marker=marker, name=_short(group), showlegend=True))
        figure.update_layout(legend={"title": _safe(panel.group_label)})
    if panel.diagonal:
        both = np.concatenate([panel.x, panel.y])
        ends = [float(both.min()), float(both.max())]
        line = {"color": MUTED, "dash": "dash", "width": 1}
        figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", line=line, showlegend=False, hoverinfo="skip"))
    x = {"title": panel.x_label, "gridcolor": _GRID, "zeroline": False}
    y = {"title": panel.y_label, "gridcolor": _GRID, "zeroline": False}
    if panel.square:
        y |= {"scaleanchor": "x"}
    if panel.log_y:
        y |= _LOG
    title = {"text": _broken(panel.title), "font": {"size": 13}, "x": 0.02}
    figure.update_layout(xaxis=x, yaxis=y, title=title)


def _histogram(figure: go.Figure, panel: Histogram) -> None:
    edges = histogram_bins(panel.values)
    counts, _ = np.histogram(panel.values, edges)
    centres = (edges[1:] + edges[:-1]) / 2
    figure.add_trace(
        go.Bar(
            x=_plain(centres),
            y=counts.tolist(),
            width=_plain(np.diff(edges)),
            marker={"color": SERIES[5], "line": {"color": "white", "width": 0.5}},
            hovertemplate=f"%{{y}} {panel.noun} near %{{x:.3g}}<extra></extra>",
        )
    )
    for colour, (name, value) in zip(cycle((SERIES[1], SERIES[0])), panel.marks.items()):
        text = f"{_short(name)}: {number_text(value)}"
        figure.add_vline(x=value, line={"color": colour, "width": 2}, annotation={"text": text, "yanchor": "bottom"})
    axes = {"gridcolor": _GRID, "zeroline": False}
    figure.update_layout(xaxis=axes | {"title": panel.x_label}, yaxis=axes | {"title": panel.noun}, showlegend=False)


def _bars(figure: go.Figure, panel: Bars) -> None:
    at = list(range(len(panel.names)))
    figure.add_trace(
        go.Bar(
            x=_plain(panel.values),
            y=at,
            orientation="h",
            marker={"color": SERIES[0]},
            customdata=_names(panel.names),
            text=list(map(number_text, panel.values)),
            textposition="outside",
            cliponaxis=False,
            hovertemplate="<b>%{customdata}</b><br>%{x:.4g}<extra></extra>",
        )
    )
    y = {
        "autorange": "reversed",
        "tickvals": at,
        "ticktext": [_short(name) for name in panel.names],
        "automargin": True,
    }
    figure.update_layout(
        xaxis={"title": panel.x_label, "gridcolor": _GRID, "zeroline": False},
        yaxis=y,
        title={"text": _safe(panel.title), "font": {"size": 13}, "x": 0.02},
        height=max(240, 22 * len(at) + 110),
        margin={"r": 60},
    )


_DRAW: dict[type, Callable[[go.Figure, Any], None]] = {
    Heatmap: _heat,
    Lines: _lines,
    Scatter: _scatter,
    Histogram: _histogram,
    Bars: _bars,
}


def _plain(values: Any) -> Any:
    """Numbers as lists, rounded to what a hovering mouse can show; None for NaN."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [_plain(row) for row in array]
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in array]


def _safe(text: str) -> str:
    """Text that plotly shows as it is: it understands some HTML."""
    return html.escape(visible(" ".join(str(text).split())), quote=False)


def _broken(text: str) -> str:
    """A label of several lines."""
    return "<br>".join(map(_safe, text.split("\n")))


def _short(text: str) -> str:
    shown = visible(" ".join(text.split()))
    return html.escape(shown if len(shown) <= _NAME else shown[: _NAME - 1] + "…", quote=False)


def _names(names: Sequence[str]) -> list[str]:
    return [_safe(name) for name in names]
