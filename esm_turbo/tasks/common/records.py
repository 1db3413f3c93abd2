"""Reading records of which some may be bad: the good ones are returned, the bad ones reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from esm_turbo.files.csv_files import CsvError, CsvRow
from esm_turbo.proteins.fasta import BadRecord

_Record = TypeVar("_Record")


def parse_rows(
    path: str | os.PathLike[str],
    rows: Iterable[CsvRow],
    noun: str,
    name: Callable[[CsvRow], str],
    parse: Callable[[int, CsvRow], _Record],
) -> tuple[list[_Record], list[BadRecord]]:
    """Parse the rows of a CSV file.

    Args:
        path: the file, for the error.
        rows: its rows.
        noun: plural noun for the rows in the error.
        name: returns a row's name for the report.
        parse: makes a record from the number of a row, counted from 1, and the row. Its ValueError becomes the reason
            of a bad record, without the row's name if it begins with that.

    Returns:
        The good records and the bad ones, in the order of the file.

    Raises:
        CsvError: the file has no rows.
    """
    good: list[_Record] = []
    bad: list[BadRecord] = []
    for number, row in enumerate(rows, start=1):
        try:
            good.append(parse(number, row))
        except ValueError as error:
            bad.append(BadRecord(name(row), str(error).removeprefix(f"{name(row)}: ")))
    if not good and not bad:
        raise CsvError(f"{os.fspath(path)}: holds no {noun}; give at least one below the column names")
    return good, bad
