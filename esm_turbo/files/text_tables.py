"""Tables of text, for terminals and reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from esm_turbo.files.safe_text import visible


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    left: Collection[int] = (0,),
    cut: Collection[int] = (),
    caption: str | None = None,
    **style: Any,
) -> Table:
    """A table whose columns are aligned to the right and never broken, as numbers are, but for those of text.

    Control characters are shown as escapes.

    Args:
        title: printed above; may be empty.
        columns: their headers, which may have several lines.
        rows: one text per column.
        left: indices of the columns of text, which are aligned to the left, and folded where the terminal is narrow.
        cut: indices of those among them that are cut off instead.
        caption: printed below, in one line even where the table is narrow.
        **style: of `rich.table.Table`.
    """
    table = Table(title=_plain(title), title_justify="left", title_style="bold", caption_justify="left", **style)
    if caption is not None:
        table.caption = Text(visible(caption), no_wrap=True, overflow="ignore")
    for index, column in enumerate(columns):
        if index in left:
            table.add_column(column, overflow="ellipsis" if index in cut else "fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [_plain(cell) for cell in row]
        for index in cut:
            # Of the texts alone: rich does not narrow a column that has it.
            cells[index].no_wrap = True
        table.add_row(*cells)
    return table


def _plain(text: str) -> Text:
    """Text without rich's markup, which an identifier such as `[/x]` would break."""
    return Text(visible(text))
