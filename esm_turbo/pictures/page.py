"""Sheets as one web page that needs nothing else: it opens offline, years later, from an e-mail."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context

from esm_turbo.assets import PAGE
from esm_turbo.files.safe_text import cell, visible
from esm_turbo.pictures.hover import spots
from esm_turbo.pictures.panels import Sheet, Table
from esm_turbo.pictures.static import STYLE, drawn_sheet

_SEARCH = "Search: a position, a variant, any word"
_NO_METADATA: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def page(sheets: Sequence[Sheet]) -> str:
    """The whole page: figures with what the mouse shows, and tables."""
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
{(PAGE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _section(number: int, sheet: Sheet) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", sheet.title)[:60].strip("_") or "esm_turbo"
    return f"""<section id="sheet{number}" data-file="{name}">
<h1>{_text(sheet.title)}</h1>
<p class="caption">{_text(sheet.caption)}</p>
{_figure(sheet)}
<div class="tools"><button class="svg">Figure as SVG</button></div>
{"" if sheet.table is None else _table(sheet.table)}
</section>"""


def _figure(sheet: Sheet) -> str:
    """The figure, and the texts under the mouse."""
    figure, placed = drawn_sheet(sheet, head=False)
    buffer = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", dpi=200, metadata=_NO_METADATA)
    svg = buffer.getvalue()
    return (
        f'<div class="figure">{svg[svg.index("<svg") :]}<div class="mark" hidden></div><div class="tip" hidden></div>'
        f'</div>\n<script type="application/json" class="spots">{_script(spots(figure, placed))}</script>'
    )


def _value(value: Any) -> Any:
    # Browsers round larger integers, such as seeds may be.
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    return cell(value) if isinstance(value, str) else value


def _table(table: Table) -> str:
    rows = [[_value(value) for value in row] for row in table.rows]
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
