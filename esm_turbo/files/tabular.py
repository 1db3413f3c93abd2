"""Results as tables: rows for files, data frames for pandas, and HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from esm_turbo.files.extras import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame

# Rows that a notebook shows.
_SHOWN = 10


class Tabular:
    """Results with rows and columns."""

    def columns(self) -> Sequence[str]:
        """Names of the columns."""
        raise NotImplementedError

    def rows(self) -> Iterable[Sequence[object]]:
        """The rows, one value per column."""
        raise NotImplementedError

    def best_first(self) -> Iterable[Sequence[object]]:
        """The rows in the order in which a notebook shows them."""
        return self.rows()

    def to_frame(self) -> DataFrame:
        """The rows as a data frame.

        Raises:
            ImportError: pandas is missing.
        """
        pandas = import_extra("pandas", "frames", "`to_frame` needs")
        frame: DataFrame = pandas.DataFrame(list(self.rows()), columns=list(self.columns()))
        return frame

    def _repr_html_(self) -> str:
        """The first rows, for notebooks."""
        rows = list(islice(self.best_first(), _SHOWN + 1))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns())
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:_SHOWN])
        more = "<p>and more: <code>to_frame()</code> has all rows</p>" if len(rows) > _SHOWN else ""
        return f"<p>{html.escape(repr(self))}</p><table><tr>{head}</tr>{body}</table>{more}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f'<td style="text-align: right">{value:.4g}</td>'
    return f"<td>{'' if value is None else html.escape(str(value))}</td>"


def named(owner: object, *values: object, **fields: object) -> str:
    """A short text for `__repr__`: the class, values, and fields by name; None is left out."""
    shown = [*map(str, values), *(f"{name}={value!r}" for name, value in fields.items() if value is not None)]
    return f"{type(owner).__name__}({', '.join(shown)})"


def counted(count: int, noun: str) -> str:
    """A number with its noun, such as `1 variant` or `1,200 variants`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
