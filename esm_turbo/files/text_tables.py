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
    caption: str | None = None,
    **style: Any,
) -> Table:
    """A table whose columns are aligned to the right, as numbers are. Control characters are shown as escapes.

    Args:
        title: printed above; may be empty.
        columns: their headers.
        rows: one text per column.
        left: indices of the columns that are aligned to the left.
        caption: printed below, in one line even where the table is narrow.
        **style: of `rich.table.Table`.
    """
    table = Table(title=_plain(title), title_justify="left", title_style="bold", caption_justify="left", **style)
    if caption is not None:
        table.caption = Text(visible(caption), no_wrap=True, overflow="ignore")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str) -> Text:
    """Text without rich's markup, which an identifier such as `[/x]` would break."""
    return Text(visible(text))
