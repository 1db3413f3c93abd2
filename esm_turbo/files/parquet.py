"""Tables in Parquet: typed columns that pandas, polars, DuckDB and Spark read, alone or as a folder of parts."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from esm_turbo.files.extras import pyarrow
from esm_turbo.files.writing import file_errors, replacing

METADATA_KEY = b"esm_turbo"
"""Key of the run's settings in a file's metadata; the value is JSON."""

ROWS_PER_GROUP = 65_536


def write_parquet(
    path: str | os.PathLike[str],
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    types: Mapping[str, type[int] | type[float]],
    metadata: Mapping[str, Any],
) -> None:
    """Write a table, atomically. Its schema depends on the names of the columns alone, so that parts are alike.

    Args:
        path: the file.
        columns: their names.
        rows: cells, one per column.
        types: of the columns that hold numbers, int64 or float64; all others are text, with every cell as it is.
            None is no value.
        metadata: the run's settings, JSON values.

    Raises:
        ImportError: pyarrow is missing.
        OSError: it cannot be written.
    """
    arrow = pyarrow()
    kinds = {int: arrow.int64(), float: arrow.float64(), str: arrow.string()}
    kind_of = [types.get(name, str) for name in columns]
    fields = [arrow.field(name, kinds[kind]) for name, kind in zip(columns, kind_of, strict=True)]
    schema = arrow.schema(fields, metadata={METADATA_KEY: as_metadata(metadata)})
    left = iter(rows)
    with replacing(path) as temporary, file_errors(path), table_writer(temporary, schema) as writer:
        while group := list(islice(left, ROWS_PER_GROUP)):
            cells = [
                arrow.array([str(cell) if kind is str and cell is not None else cell for cell in column], field.type)
                for column, kind, field in zip(zip(*group, strict=True), kind_of, fields, strict=True)
            ]
            writer.write_table(arrow.table(cells, schema=schema))


def table_writer(path: str | os.PathLike[str], schema: Any) -> Any:
    """A `pyarrow.parquet.ParquetWriter` whose pages have checksums."""
    return pyarrow().parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)


def as_metadata(settings: Mapping[str, Any]) -> bytes:
    """The run's settings as a file keeps them, with the version of this package."""
    version = {"esm_turbo": importlib.metadata.version("esm_turbo")}
    return json.dumps(version | dict(settings), sort_keys=True).encode()


def parquet_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents of a table: rows, columns with their types, and the run's settings.

    Raises:
        ValueError: the file is damaged or no Parquet file.
        ImportError: pyarrow is missing.
    """
    settings = parquet_settings(path)
    file = pyarrow().parquet.read_metadata(path)
    columns = {field.name: str(field.type) for field in file.schema.to_arrow_schema()}
    return {"kind": "table", "format": "parquet", "rows": file.num_rows, "columns": columns, **settings}


def parquet_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The run's settings in the metadata of a table; empty if another program wrote it.

    Raises:
        ValueError: the file is damaged or no Parquet file.
        ImportError: pyarrow is missing.
    """
    arrow = pyarrow()
    try:
        metadata = arrow.parquet.read_schema(path).metadata or {}
        settings: dict[str, Any] = json.loads(metadata.get(METADATA_KEY, b"{}"))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: damaged, or not a Parquet file ({error})") from error
    return settings
