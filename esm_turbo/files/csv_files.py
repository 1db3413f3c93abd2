"""Read and write CSV files with named columns."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from esm_turbo.files.safe_text import cell, from_cell
from esm_turbo.files.text_files import text_lines
from esm_turbo.files.writing import replacing


class CsvRow(dict[str, str]):
    """A row of a CSV file: columns by name.

    Attributes:
        line: number of its first line in the file, counted from 1.
    """

    def __init__(self, cells: dict[str, str], line: int) -> None:
        super().__init__(cells)
        self.line = line


class CsvError(ValueError):
    """A CSV file cannot be used; the message names the file and the remedy."""


def is_csv(path: str | os.PathLike[str]) -> bool:
    """Whether a file is CSV by its name, plain or gzip."""
    return Path(os.fspath(path).lower().removesuffix(".gz")).suffix == ".csv"


def read_csv(path: str | os.PathLike[str], required: Sequence[str], optional: Sequence[str] = ()) -> list[CsvRow]:
    """Read columns of a CSV file, plain or gzip, whose first line names them.

    Args:
        path: the file.
        required: columns that must be present; names are case-insensitive.
        optional: columns that may be absent.

    Returns:
        Per row, the stripped text of each requested column, empty where the column is absent or the row too short, as
        it was before `write_csv`. Empty rows are left out.

    Raises:
        CsvError: the file is missing, not text, damaged or empty, or lacks a column.
    """
    try:
        return _rows(text_lines(path, newline=""), required, optional)
    except UnicodeDecodeError:
        reason = "is not text; give a comma-separated table, encoded as UTF-8, plain or gzip"
    except csv.Error as error:
        reason = f"is not CSV ({error})"
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); check the path"
    except ValueError as error:
        reason = str(error)
    raise CsvError(f"{os.fspath(path)}: {reason}") from None


def write_csv(out: str | os.PathLike[str] | TextIO, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file, atomically. Text that a spreadsheet would run, and control characters, are neutralised.

    Args:
        out: a path, or an open file.
        columns: their names.
        rows: cells, one per column.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(out, str | os.PathLike):
        with replacing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            write_csv(file, columns, rows)
    else:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([cell(one) if isinstance(one, str) else one for one in row] for row in rows)


def _rows(text: Iterable[str], required: Sequence[str], optional: Sequence[str]) -> list[CsvRow]:
    lines = csv.reader(text, strict=True)
    head = [name.strip().lower() for name in next(lines, [])]
    if not any(head):
        raise ValueError("is empty; its first line must name the columns")
    missing = [name for name in required if name.lower() not in head]
    if missing:
        raise ValueError(f"lacks the column {missing[0]!r}; there are {', '.join(map(repr, filter(None, head)))}")
    at = {name: head.index(name.lower()) for name in [*required, *optional] if name.lower() in head}
    wanted = [*required, *optional]
    rows, begin = [], lines.line_num + 1
    for cells in lines:
        texts = [from_cell(text).strip() for text in cells]
        if any(texts):
            found = {name: texts[at[name]] if name in at and at[name] < len(texts) else "" for name in wanted}
            rows.append(CsvRow(found, begin))
        # A quoted cell may span several lines.
        begin = lines.line_num + 1
    return rows
