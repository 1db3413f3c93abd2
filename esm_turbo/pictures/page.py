"""Sheets as one web page that needs nothing else: it opens offline, years later, from an e-mail."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from esm_turbo.assets import PAGE
from esm_turbo.files.safe_text import cell, visible
from esm_turbo.pictures.interactive import panel_figure, tracks_figure, tracks_width
from esm_turbo.pictures.panels import Heatmap, Sheet, Table, Tracks

_SEARCH = "Search: a position, a variant, any word"


def page(sheets: Sequence[Sheet]) -> str:
    """The whole page: figures, tables, and the script that draws them."""
    title = sheets[0].title if len(sheets) == 1 else f"{sheets[0].title} and {len(sheets) - 1} more"
    sections = "\n".join(_section(number, sheet) for number, sheet in enumerate(sheets, start=1))
    links = "".join(f'<a href="#sheet{number}">{_text(one.title)}</a>' for number, one in enumerate(sheets, start=1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="esm_turbo">
<title>{_text(title)}</title>
<style>
{(PAGE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
{f"<nav>{links}</nav>" if len(sheets) > 1 else ""}
{sections}
<script>
{get_plotlyjs()}
</script>
<script>
{(PAGE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _section(number: int, sheet: Sheet) -> str:
    parts, count = [], 0
    for row in sheet.layout:
        if isinstance(row, Tracks):
            count += 1
            name = f"figure{number}-{count}"
            parts.append(_figure(name, tracks_figure(row), "figure tracks", tracks_width(row)))
            continue
        parts.append('<div class="panels">')
        for panel in row:
            count += 1
            wide = isinstance(panel, Heatmap) and panel.square
            parts.append(_figure(f"figure{number}-{count}", panel_figure(panel), "figure wide" if wide else "figure"))
        parts.append("</div>")
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", sheet.title)[:60].strip("_") or "esm_turbo"
    return f"""<section id="sheet{number}" data-file="{name}">
<h1>{_text(sheet.title)}</h1>
<p class="caption">{_text(sheet.caption)}</p>
{"".join(parts)}
<div class="tools"><button class="svg">Figures as SVG</button><button class="png">Figures as PNG</button></div>
{"" if sheet.table is None else _table(sheet.table)}
</section>"""


def _figure(name: str, figure: go.Figure, classes: str, most: int | None = None) -> str:
    """A figure, at most so many pixels wide."""
    data = _script(json.loads(figure.to_json()))
    width = "" if most is None else f"; max-width: {most}px"
    return (
        f'<div id="{name}" class="{classes}" style="height: {figure.layout.height}px{width}"></div>'
        f'<script type="application/json" id="{name}-data">{data}</script>\n'
    )


def _table(table: Table) -> str:
    rows = [[cell(value) if isinstance(value, str) else value for value in row] for row in table.rows]
    data = _script({"columns": [cell(name) for name in table.columns], "rows": rows, "position": table.position})
    return f"""<div class="tools"><input type="search" placeholder="{_SEARCH}" aria-label="{_SEARCH}">
<button class="csv">These rows as CSV</button><span class="found" role="status"></span></div>
<div class="scroll"><table><thead><tr></tr></thead><tbody></tbody></table></div>
<script type="application/json" class="table">{data}</script>"""


def _script(data: Any) -> str:
    """JSON that cannot end the script which holds it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(text: str) -> str:
    return html.escape(visible(" ".join(text.split())))
