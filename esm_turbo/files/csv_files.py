"""Read tables of named columns, separated by commas or tabs, and write them as CSV.

By the standard library's `csv`: pandas, an extra, does not say in which line a row begins, which errors name.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from esm_turbo.files.safe_text import cell, from_cell
from esm_turbo.files.suffixes import TABLE_DELIMITERS, check_suffix
from esm_turbo.files.text_files import NO_SUCH_FILE, text_lines
from esm_turbo.files.writing import replacing

if TYPE_CHECKING:
    from _csv import Reader


# What tables are separated by that are not read, and its name in the error.
_OTHER_SEPARATORS = {";": "';'", "\t": "tabs", ",": "','", "|": "'|'"}


class CsvRow(dict[str, str]):
    """A row of a table: the requested columns by name.

    Attributes:
        line: number of its first line in the file, counted from 1.
        cells: all columns, by their names in the file.
    """

    def __init__(self, requested: dict[str, str], line: int, cells: dict[str, str] | None = None) -> None:
        super().__init__(requested)
        self.line = line
        self.cells = requested if cells is None else cells

    def without(self, *names: str) -> dict[str, str]:
        """All columns but some, whose names are case-insensitive."""
        lower = {name.lower() for name in names}
        return {name: text for name, text in self.cells.items() if name.lower() not in lower}


class CsvError(ValueError):
    """A CSV file cannot be used; the message names the file and the remedy."""


def is_table(path: str | os.PathLike[str]) -> bool:
    """True if a file is a table by its name: `.csv` or `.tsv`, plain or gzip."""
    return _suffix(path) in (".csv", ".tsv")


def delimiter_of(path: str | os.PathLike[str]) -> str:
    """The separator of a file's columns: a tab if its name ends in `.tsv`, and else a comma."""
    return "\t" if _suffix(path) == ".tsv" else ","


def read_csv(
    path: str | os.PathLike[str],
    required: Sequence[str],
    optional: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> list[CsvRow]:
    """Read a table, plain or gzip, whose first line names the columns.

    Args:
        path: the file; `.tsv` is separated by tabs, any other by commas.
        required: columns that must be present; names are case-insensitive.
        optional: columns that may be absent.
        aliases: another name of some columns; a file has one of both.

    Returns:
        Per row, the stripped text of each requested column, empty where the column is absent or the row too short, as
        it was before `write_csv`. Empty rows are left out.

    Raises:
        CsvError: the file is missing, not text, damaged or empty, lacks a column or has one twice, a row is longer than
            the first line, or a cell between tabs goes on after a tab or a line.
    """
    try:
        delimiter = delimiter_of(path)
        lines = csv.reader(text_lines(path, newline=""), delimiter=delimiter, strict=True)
        return _rows(lines, required, optional, aliases or {}, quotes=delimiter != "\t")
    except UnicodeDecodeError:
        reason = "is not text; give a table separated by commas or tabs, encoded as UTF-8, plain or gzip"
    except csv.Error as error:
        reason = f"is not CSV ({error})"
    except FileNotFoundError:
        reason = NO_SUCH_FILE
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); check the path"
    except ValueError as error:
        reason = str(error)
    raise CsvError(f"{os.fspath(path)}: {reason}") from None


def write_csv(
    out: str | os.PathLike[str] | TextIO,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    delimiter: str | None = None,
) -> None:
    """Write a table, atomically. Text that a spreadsheet would run, and control characters, are neutralised.

    Args:
        out: a path, or an open file.
        columns: their names.
        rows: cells, one per column.
        delimiter: None is a tab for a path that ends in `.tsv`, and else a comma.

    Raises:
        SuffixError: (a ValueError) the path ends in neither `.csv` nor `.tsv`.
        OSError: it cannot be written.
    """
    if isinstance(out, str | os.PathLike):
        delimiter = delimiter or TABLE_DELIMITERS.get(check_suffix(out, TABLE_DELIMITERS))
        with replacing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            write_csv(file, columns, rows, delimiter)
    else:
        writer = csv.writer(out, lineterminator="\n", delimiter=delimiter or ",")
        writer.writerows([cell(one) if isinstance(one, str) else one for one in row] for row in chain([columns], rows))


def _suffix(path: str | os.PathLike[str]) -> str:
    return Path(os.fspath(path).lower().removesuffix(".gz")).suffix


def _rows(
    lines: Reader, required: Sequence[str], optional: Sequence[str], aliases: Mapping[str, str], *, quotes: bool
) -> list[CsvRow]:
    """The rows of a table; `quotes` lets a cell hold what separates them."""
    names = [from_cell(name).strip() for name in next(lines, [])]
    head = [name.lower() for name in names]
    if not any(head):
        raise ValueError("is empty; its first line must name the columns")
    twice = next((name for name in head if name and head.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"has the column {twice!r} twice; remove or rename one")
    both = next(((name, other) for name, other in aliases.items() if {name.lower(), other.lower()} <= {*head}), None)
    if both is not None:
        raise ValueError(f"has the columns {both[0]!r} and {both[1]!r}, which mean the same; remove or rename one")
    wanted = [*required, *optional]
    called = {name: name if name.lower() in head else aliases.get(name, name) for name in wanted}
    at = {name: head.index(called[name].lower()) for name in wanted if called[name].lower() in head}
    missing = [name for name in required if name not in at]
    if missing:
        raise ValueError(_missing_column(missing[0], aliases, names))
    rows, begin = [], lines.line_num + 1
    for cells in lines:
        texts = [from_cell(text).strip() for text in cells]
        if not quotes and any(set("\t\r\n") & set(text) for text in texts):
            # Most programs quote nothing between tabs: such a cell has swallowed others.
            raise ValueError(f"line {begin} has a quotation mark that ends in line {lines.line_num}; remove it")
        if any(texts[len(names) :]):
            raise ValueError(
                f"line {begin} has {len(texts)} cells, the first line names {len(names)} columns; quote cells that hold"
                " what separates them"
            )
        if any(texts):
            texts += [""] * (len(names) - len(texts))
            found = {name: texts[at[name]] if name in at else "" for name in wanted}
            rows.append(CsvRow(found, begin, {name: text for name, text in zip(names, texts, strict=False) if name}))
        # A quoted cell may span several lines.
        begin = lines.line_num + 1
    return rows


def _missing_column(name: str, aliases: Mapping[str, str], head: Sequence[str]) -> str:
    """The error text for a table without a column, with a likely cause."""
    there = list(filter(None, head))
    alias = f" (or {aliases[name]!r})" if name in aliases else ""
    lacks = f"lacks the column {name!r}{alias}"
    if len(there) > 1:
        return f"{lacks}; there are {', '.join(map(repr, there))}"
    # Perhaps a list without a header, or another separator.
    reason = f"{lacks}; its first line, which names the columns, is {there[0]!r}"
    other = next((mark for mark in _OTHER_SEPARATORS if mark in there[0]), None)
    if other is None:
        return reason
    return f"{reason}; separate columns by commas, or by tabs in a .tsv file, not by {_OTHER_SEPARATORS[other]}"
