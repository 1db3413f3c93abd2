"""Tables of text, for terminals and reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from esm_turbo.files.safe_text import visible
from esm_turbo.files.tabular import counted

# Characters of a text that a narrow table still shows in a line, if it has as many.
_READABLE = 10


class _Fitting(Table):
    """A table that leaves out columns where it is too wide.

    Attributes:
        needs: characters that each column needs.
        spare: indices of the columns that may be left out, in their order.
    """

    needs: Sequence[int] = ()
    spare: Sequence[int] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, needs, spare = self.columns, dict(enumerate(self.needs)), list(self.spare)
        # Each has a border and a space on both sides.
        while spare and sum(needs.values()) + 3 * len(needs) + 1 > options.max_width:
            del needs[spare.pop(0)]
        self.columns = [columns[index] for index in needs]
        yield from super().__rich_console__(console, options)
        if left := len(columns) - len(needs):
            yield Text(f"{counted(left, 'more column')} in a wider terminal")
        self.columns = columns


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    left: Collection[int] = (0,),
    cut: Collection[int] = (),
    spare: Sequence[int] = (),
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
        spare: indices of columns of numbers that are left out where the terminal is too narrow, the first ones first.
        caption: printed below, in one line even where the table is narrow.
        **style: of `rich.table.Table`.
    """
    table = _Fitting(title=_plain(title), title_justify="left", title_style="bold", caption_justify="left", **style)
    if caption is not None:
        table.caption = Text(visible(caption), no_wrap=True, overflow="ignore")
    for index, column in enumerate(columns):
        if index in left:
            table.add_column(column, overflow="ellipsis" if index in cut else "fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    needs = [max(map(cell_len, column.split("\n"))) for column in columns]
    for row in rows:
        cells = [_plain(cell) for cell in row]
        needs = [max(need, cell.cell_len) for need, cell in zip(needs, cells, strict=True)]
        for index in cut:
            # Of the texts alone: rich does not narrow a column that has it.
            cells[index].no_wrap = True
        table.add_row(*cells)
    table.needs = [min(need, _READABLE) if index in left else need for index, need in enumerate(needs)]
    table.spare = spare
    return table


def _plain(text: str) -> Text:
    """Text without rich's markup, which an identifier such as `[/x]` would break."""
    return Text(visible(text))
