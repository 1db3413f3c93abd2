"""Mean embeddings as a table in Parquet, which pandas, polars, DuckDB and Spark read, alone or as a folder of shards.

A row holds one layer of one protein; the layers of a protein follow each other, ascending:

    id             string                             the protein's identifier
    sequence_hash  string                             of its whole sequence, as in the other formats
    residues       int64                              of its whole sequence
    layer          int64                              0 is the input of the first layer
    mean           fixed_size_list<float>[hidden]     mean of the layer's hidden states over the residues

The rows are in the order of the input; proteins with the same sequence have rows of their own. `settings` in the
metadata are those of the embeddings. The functions are those of a `OneFileFormat`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.extras import pyarrow
from esm_turbo.files.kinds import is_parquet
from esm_turbo.files.parquet import METADATA_KEY, as_metadata, parquet_settings
from esm_turbo.files.writing import file_errors
from esm_turbo.tasks.embedding.files import Row

ROWS_PER_GROUP = 1024
"""Some 5 MB of the largest checkpoints' means."""


def check(out: Path, include: Sequence[str]) -> None:
    """Check that a file may be written, and holds these results."""
    pyarrow()
    if set(include) != {"mean"}:
        raise ValueError(f"a Parquet file holds means: give `include` mean, not {' '.join(include)}")
    if out.exists() and out.stat().st_size and not is_parquet(out):
        raise ValueError(f"{out}: exists and is not a Parquet file; give another file")


def settings(path: Path) -> dict[str, Any]:
    """The settings of the embeddings in a file."""
    with _damage(path):
        found: dict[str, Any] = parquet_settings(path).get("settings", {})
    if "repr_layers" not in found:
        raise ValueError(f"{path}: holds no embeddings of esm-turbo; give another file")
    return found


def names(path: Path) -> dict[str, str]:
    """The entry of each identifier; pages have checksums, which are verified."""
    layers, found = settings(path)["repr_layers"], dict[str, str]()
    with _damage(path), pyarrow().parquet.ParquetFile(path, page_checksum_verification=True) as file:
        rows = (row for number in range(file.num_row_groups) for row in _rows(file.read_row_group(number)))
        while group := list(islice(rows, len(layers))):
            identifier, name, residues, _ = group[0]
            if group != [(identifier, name, residues, layer) for layer in layers]:
                raise ValueError("it has other layers")
            found[identifier] = name
    return found


def _rows(table: Any) -> Iterator[tuple[Any, ...]]:
    """Rows of a table, without the means."""
    if not table.schema.equals(_schema(table.schema.field("mean").type.list_size, {})):
        raise ValueError("it has other columns")
    if any(column.null_count for column in table.columns):
        raise ValueError("cells are empty")
    return zip(*(column.to_pylist() for column in table.columns[:-1]), strict=True)


def write(path: Path, settings: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Write a file."""
    arrow, layers, writer = pyarrow(), settings["repr_layers"], None
    rows = iter(rows)
    with contextlib.ExitStack() as opened:
        opened.enter_context(file_errors(path))
        while group := list(islice(rows, max(1, ROWS_PER_GROUP // len(layers)))):
            means = np.stack([row.arrays[f"mean_representations.{layer}"] for row in group for layer in layers])
            schema = _schema(means.shape[1], settings)
            columns = [
                [row.identifier for row in group for _ in layers],
                [row.name for row in group for _ in layers],
                [row.residues for row in group for _ in layers],
                layers * len(group),
                arrow.FixedSizeListArray.from_arrays(arrow.array(means.reshape(-1)), means.shape[1]),
            ]
            if writer is None:
                # Means never repeat: a dictionary of them would be built in vain.
                options = {"use_dictionary": ["layer"], "compression": "zstd", "write_page_checksum": True}
                writer = opened.enter_context(arrow.parquet.ParquetWriter(path, schema, **options))
            writer.write_table(arrow.table(columns, schema=schema))
        if writer is None:
            arrow.parquet.write_table(_schema(1, settings).empty_table(), path)


def _schema(hidden_size: int, settings: Mapping[str, Any]) -> Any:
    """Schema of a table of means: a `pyarrow.Schema` with the settings in its metadata."""
    arrow = pyarrow()
    fields = [
        ("id", arrow.string()),
        ("sequence_hash", arrow.string()),
        ("residues", arrow.int64()),
        ("layer", arrow.int64()),
        ("mean", arrow.list_(arrow.float32(), hidden_size)),
    ]
    return arrow.schema(fields, metadata={METADATA_KEY: as_metadata({"settings": dict(settings)})})


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (ImportError, MemoryError):
        raise
    # A damaged file can make pyarrow raise almost any exception.
    except Exception as error:
        raise ArtifactError(f"{path}: damaged ({error}); write it again") from error
