"""Tables of results: CSV, TSV or Parquet, by the suffix of their name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from esm_turbo.files.csv_files import write_csv
from esm_turbo.files.parquet import write_parquet
from esm_turbo.files.suffixes import PARQUET, TABLES, check_suffix


def write_table(
    out: str | os.PathLike[str] | TextIO,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    types: Mapping[str, type[int] | type[float]],
    metadata: Mapping[str, Any],
) -> None:
    """Write a table, atomically, see `write_csv` and `write_parquet`; an open file gets CSV.

    Raises:
        SuffixError: (a ValueError) the path ends in none of `TABLES`.
        ImportError: pyarrow is missing.
        OSError: it cannot be written.
    """
    if isinstance(out, str | os.PathLike) and check_suffix(out, TABLES) == PARQUET:
        write_parquet(out, columns, rows, types, metadata)
    else:
        write_csv(out, columns, rows)
