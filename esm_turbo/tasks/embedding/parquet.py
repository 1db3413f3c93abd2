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
from esm_turbo.tasks.embedding.files import Arrays, Entry

ROWS_PER_GROUP = 1024
"""Some 5 MB of the largest checkpoints' means."""
# Of all tables that are joined: some 300 MB of the largest checkpoints' means.
_ROWS_HELD = 65_536

in_order = True


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


def read(path: Path, joined: int = 1) -> Iterator[tuple[list[str], Entry]]:
    """Yield the entries of a file in its order, each with one identifier; pages have checksums, which are verified."""
    layers = settings(path)["repr_layers"]
    with _damage(path):
        rows = _rows(path, max(1, _ROWS_HELD // joined))
        while group := list(islice(rows, len(layers))):
            identifier, name, residues, *_ = group[0]
            if [row[:4] for row in group] != [(identifier, name, residues, layer) for layer in layers]:
                raise ValueError("it has other layers")
            means = {f"mean_representations.{layer}": mean for *_, layer, mean in group}
            yield [identifier], Entry(means, None, residues, name)


def _rows(path: Path, held: int) -> Iterator[tuple[Any, ...]]:
    """Rows of a table, of which `held` are in memory."""
    metadata = pyarrow().parquet.read_metadata(path)
    for number in range(metadata.num_row_groups):
        for begin in range(0, metadata.row_group(number).num_rows, held):
            # For a moment: more tables may be joined than may be open.
            with pyarrow().parquet.ParquetFile(path, metadata=metadata, page_checksum_verification=True) as file:
                table = file.read_row_group(number).slice(begin, held)
            if not table.schema.equals(_schema(table.schema.field("mean").type.list_size, {})):
                raise ValueError("it has other columns")
            *cells, means = (column.combine_chunks() for column in table.columns)
            if any(column.null_count for column in (*cells, means)):
                raise ValueError("cells are empty")
            states = np.asarray(means.flatten()).reshape(len(means), -1).copy()
            yield from zip(*(column.to_pylist() for column in cells), states, strict=True)


def find(path: Path, names: Sequence[str]) -> Iterator[Arrays]:
    """Yield the means of sequences in the order of their names; all are in memory together."""
    wanted = set(names)
    means = {entry.name: entry.arrays for _, entry in read(path) if entry.name in wanted}
    return (means[name] for name in names)


def write(path: Path, settings: Mapping[str, Any], entries: Iterable[tuple[list[str], Entry]]) -> None:
    """Write a file."""
    arrow, layers, writer = pyarrow(), settings["repr_layers"], None
    each = ((identifier, entry) for identifiers, entry in entries for identifier in identifiers)
    with contextlib.ExitStack() as opened:
        opened.enter_context(file_errors(path))
        while group := list(islice(each, max(1, ROWS_PER_GROUP // len(layers)))):
            means = np.stack([entry.arrays[f"mean_representations.{layer}"] for _, entry in group for layer in layers])
            schema = _schema(means.shape[1], settings)
            columns = [
                [identifier for identifier, _ in group for _ in layers],
                [entry.name for _, entry in group for _ in layers],
                [entry.residues for _, entry in group for _ in layers],
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
