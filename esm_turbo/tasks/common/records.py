"""Records of tables, of which some may be bad."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from esm_turbo.files.csv_files import CsvError, CsvRow
from esm_turbo.proteins.fasta import BadRecord
from esm_turbo.proteins.lookup import UnknownProteinError, listed

_Record = TypeVar("_Record")

_SHOWN_LINES = 3


def parse_rows(
    path: str | os.PathLike[str],
    rows: Iterable[CsvRow],
    noun: str,
    name: Callable[[CsvRow], str],
    parse: Callable[[int, CsvRow], _Record],
) -> tuple[list[_Record], list[BadRecord]]:
    """Parse the rows of a table.

    Args:
        path: the file, for the error.
        rows: its rows.
        noun: plural noun for the rows in the error.
        name: returns a row's name for the report.
        parse: makes a record from the number of a row, counted from 1, and the row. Its ValueError becomes the reason
            of a bad record, without the row's name if it begins with that.

    Returns:
        The good records and the bad ones, in the order of the file. Several rows with unknown proteins are one bad
        record, the last.

    Raises:
        CsvError: the file has no rows, or all of several name unknown proteins.
    """
    good: list[_Record] = []
    bad: list[BadRecord] = []
    unknown: list[tuple[CsvRow, UnknownProteinError]] = []
    for number, row in enumerate(rows, start=1):
        try:
            good.append(parse(number, row))
        except UnknownProteinError as error:
            unknown.append((row, error))
        except ValueError as error:
            bad.append(BadRecord(name(row), str(error).removeprefix(f"{name(row)}: ")))
    if not good and not bad and not unknown:
        raise CsvError(f"{os.fspath(path)}: holds no {noun}; give at least one below the column names")
    if len(unknown) == 1:
        [(row, one)] = unknown
        bad.append(BadRecord(name(row), str(one)))
    elif unknown:
        kind, known = unknown[0][1].noun, unknown[0][1].known
        names = listed(list(dict.fromkeys(error.name for _, error in unknown)))
        if not good and not bad:
            raise CsvError(f"{os.fspath(path)}: no row names a usable {kind}, but {names}; there are {listed(known)}")
        lines = listed_lines([row.line for row, _ in unknown])
        bad.append(BadRecord(lines, f"there is no usable {kind} {names}; there are {listed(known)}", len(unknown)))
    return good, bad


def listed_lines(lines: list[int]) -> str:
    """The first of many lines of a file, such as `lines 3, 4 and 98 more`."""
    if len(lines) == 1:
        return f"line {lines[0]}"
    first = ", ".join(map(str, lines[:_SHOWN_LINES]))
    rest = len(lines) - _SHOWN_LINES
    return f"lines {first}" + (f" and {rest:,} more" if rest > 0 else "")
