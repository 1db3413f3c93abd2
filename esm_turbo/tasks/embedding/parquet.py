"""Mean embeddings as a table in Parquet, which pandas, polars, DuckDB and Spark read, alone or as a folder of shards.

A row holds one layer of one protein; the layers of a protein follow each other, ascending:

    id             string                             the protein's identifier
    sequence_hash  string                             of its whole sequence, as in the other formats
    residues       int64                              of its whole sequence
    layer          int64                              0 is the input of the first layer
    mean           fixed_size_list<float>[hidden]     mean of the layer's hidden states over the residues

The rows are in the order of the input; proteins with the same sequence have rows of their own. `settings` in the
metadata are those of the embeddings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.files.arrow import pyarrow
from esm_turbo.files.kinds import is_parquet
from esm_turbo.files.parquet import METADATA_KEY, as_metadata, parquet_settings
from esm_turbo.files.writing import file_errors
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import check_same_settings, read_embedding
from esm_turbo.tasks.embedding.one_file import OneFileWriter

ROWS_PER_GROUP = 4096
"""Some 20 MB of the largest checkpoints' means."""

Array = npt.NDArray[np.float32]


def check_parquet(out: Path, include: Sequence[str]) -> None:
    """Check, before any work is done, that means can be written and no other file is overwritten.

    Args:
        out: the file.
        include: the results that are requested.

    Raises:
        ValueError: more than means is requested, or the path is a file of another kind.
        ImportError: pyarrow is missing.
    """
    pyarrow()
    if list(include) != ["mean"]:
        raise ValueError(f"a Parquet file holds means: include `mean` alone, not {' '.join(include)}")
    if out.exists() and out.stat().st_size and not is_parquet(out):
        raise ValueError(f"{out}: exists and is not a Parquet file; give another file")


def means_schema(hidden_size: int, settings: Mapping[str, Any]) -> Any:
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


def means_writer(path: str | os.PathLike[str], schema: Any) -> Any:
    """A `pyarrow.parquet.ParquetWriter` of a table of means, whose pages have checksums."""
    options = {"compression": "zstd", "write_page_checksum": True}
    # Means never repeat: a dictionary of them would be built in vain.
    return pyarrow().parquet.ParquetWriter(path, schema, use_dictionary=["layer"], **options)


def means_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of the embeddings in a table of means.

    Raises:
        ValueError: the file is damaged, or holds no embeddings of this package.
        ImportError: pyarrow is missing.
    """
    settings = parquet_settings(path).get("settings", {})
    if "repr_layers" not in settings:
        raise NoMeansError(f"{os.fspath(path)}: holds no embeddings of esm-turbo; give another file")
    return dict(settings)


class NoMeansError(ValueError):
    """A Parquet file holds something else than means."""


class ParquetWriter(OneFileWriter):
    """Writes one table of means for all sequences, see `OneFileWriter`."""

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        # As in an index, so that the rows do not depend on interruptions.
        moved = {record.id: self._entry_of[record.id] for record in records if record.id in self._entry_of}
        ordered = {one: name for one, name in self._entry_of.items() if one not in moved} | moved
        self._changed |= list(ordered) != list(self._entry_of)
        self._entry_of = ordered
        self._residues |= {record.id: len(record.sequence) for record in records}
        super().finish(records)

    def _read_existing(self) -> None:
        # By hash, the first of a protein's rows.
        self._first_row: dict[str, int] = {}
        self._residues: dict[str, int] = {row[0]: int(row[1]) for row in self.index.rows}
        self._layers: list[int] = self._content["repr_layers"]
        self._hidden_size = int(self.turbo.model.config.hidden_size)
        if not self.out.exists():
            return
        try:
            existing = means_settings(self.out)
        except NoMeansError:
            raise
        except ValueError:
            self._set_damaged()
            return
        check_same_settings(self.out, existing, self._content)
        try:
            self._read_rows()
        except (pyarrow().ArrowException, OSError, ValueError):
            self._first_row.clear()
            self._entry_of.clear()
            self._set_damaged()

    def _read_rows(self) -> None:
        """Note what the existing table holds; reads it all, and so checks the checksums of its pages.

        Raises:
            ValueError: it is not what this class writes.
        """
        file, number = self._open(), 0
        if not file.schema_arrow.equals(means_schema(self._hidden_size, {})):
            raise ValueError("other columns")
        for batch in file.iter_batches():
            if any(column.null_count for column in batch.columns):
                raise ValueError("empty cells")
            columns = (batch.column(name).to_pylist() for name in ("id", "sequence_hash", "residues", "layer"))
            for identifier, name, residues, layer in zip(*columns, strict=True):
                place = number % len(self._layers)
                if layer != self._layers[place] or (place and self._entry_of.get(identifier) != name):
                    raise ValueError("other layers")
                if not place:
                    self._entry_of[identifier] = name
                    self._residues[identifier] = residues
                    self._first_row.setdefault(name, number)
                number += 1
        if number % len(self._layers):
            raise ValueError("layers are missing")

    def _open(self) -> Any:
        return pyarrow().parquet.ParquetFile(self.out, page_checksum_verification=True)

    def _holds(self, name: str, key: str) -> bool:
        return name in self._first_row

    def _assemble(self, path: Path) -> None:
        schema = means_schema(self._hidden_size, self._content | self.recorded)
        old = _Means(self._open()) if self._first_row else None
        per_group, left = proteins_per_group(len(self._layers)), iter(self._entry_of.items())
        with file_errors(self.out), means_writer(path, schema) as writer:
            while group := list(islice(left, per_group)):
                found = [(one, name, means) for one, name in group if (means := self._means(name, old)) is not None]
                if found:
                    writer.write_table(self._table(found, schema))

    def _means(self, name: str, old: _Means | None) -> list[Array] | None:
        """The means of a sequence by layer, [hidden_size] each; None if they could not be computed."""
        first = self._first_row.get(name)
        if first is not None and old is not None:
            return [old.row(first + place) for place in range(len(self._layers))]
        part = self.folder / f"{name}.safetensors"
        if not part.exists():
            return None
        tensors = read_embedding(part)[1]
        return [tensors[f"mean_representations.{layer}"].numpy() for layer in self._layers]

    def _table(self, found: Sequence[tuple[str, str, list[Array]]], schema: Any) -> Any:
        arrow, layers = pyarrow(), len(self._layers)
        means = np.stack([mean for *_, own in found for mean in own])
        columns = [
            arrow.array([one for one, *_ in found for _ in range(layers)], arrow.string()),
            arrow.array([name for _, name, _ in found for _ in range(layers)], arrow.string()),
            arrow.array(np.repeat([self._residues[one] for one, *_ in found], layers), arrow.int64()),
            arrow.array(np.tile(self._layers, len(found)), arrow.int64()),
            arrow.FixedSizeListArray.from_arrays(arrow.array(means.reshape(-1)), self._hidden_size),
        ]
        return arrow.table(columns, schema=schema)


class _Means:
    """The column `mean` of a table, by row.

    Args:
        file: a `pyarrow.parquet.ParquetFile`.
    """

    def __init__(self, file: Any) -> None:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._ends = np.cumsum(sizes)
        # Rows are mostly asked for in their order.
        self._group = lru_cache(maxsize=4)(lambda group: column_of_means(file.read_row_group(group, ["mean"])))

    def row(self, number: int) -> Array:
        """A row, [hidden_size]."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        begin = int(self._ends[group - 1]) if group else 0
        row: Array = self._group(group)[number - begin]
        return row


def column_of_means(table: Any) -> Array:
    """The column `mean` of a `pyarrow.Table`, [rows, hidden_size]."""
    column = table.column("mean").combine_chunks()
    return np.asarray(column.flatten()).reshape(len(column), -1)


def proteins_per_group(layers: int) -> int:
    """Number of proteins whose rows are written at once."""
    return max(1, ROWS_PER_GROUP // layers)


def read_means(out: str | os.PathLike[str], records: Sequence[ProteinRecord]) -> Iterator[dict[str, Array]]:
    """Yield the means of records by flat name such as `mean_representations.12`, from a table of them.

    Raises:
        ValueError: the file is damaged, or a record is missing.
    """
    table = pyarrow().parquet.read_table(out, page_checksum_verification=True)
    means = column_of_means(table)
    rows: dict[str, dict[str, Array]] = {}
    for number, (identifier, layer) in enumerate(
        zip(table.column("id").to_pylist(), table.column("layer").to_pylist(), strict=True)
    ):
        rows.setdefault(identifier, {})[f"mean_representations.{layer}"] = means[number]
    for record in records:
        if record.id not in rows:
            raise ValueError(f"{os.fspath(out)}: holds no embedding of {record.id!r}; embed it first")
        yield rows[record.id]
