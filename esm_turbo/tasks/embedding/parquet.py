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

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.extras import pyarrow
from esm_turbo.files.kinds import is_parquet
from esm_turbo.files.parquet import METADATA_KEY, as_metadata, parquet_settings
from esm_turbo.files.writing import file_errors
from esm_turbo.tasks.embedding.files import Entry
from esm_turbo.tasks.embedding.one_file import EmbeddingFile

ROWS_PER_GROUP = 1024
"""Some 5 MB of the largest checkpoints' means."""
# Of all tables that are joined: some 300 MB of the largest checkpoints' means.
_ROWS_HELD = 65_536

Array = npt.NDArray[np.float32]


class MeansFile(EmbeddingFile):
    """Means in Parquet, see `EmbeddingFile`."""

    in_order = True

    def __init__(self, path: Path, joined: int = 1) -> None:
        with _damage(path):
            settings = parquet_settings(path).get("settings", {})
            self._metadata = pyarrow().parquet.read_metadata(path)
        if "repr_layers" not in settings:
            raise ValueError(f"{path}: holds no embeddings of esm-turbo; give another file")
        self.path, self.settings = path, dict(settings)
        self._layers: list[int] = settings["repr_layers"]
        sizes = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        self._ends = np.cumsum(sizes)
        # By name, the first of a sequence's rows, and its residues.
        self._first_row: dict[str, tuple[int, int]] = {}
        # Rows are mostly asked for in their order.
        self._rows_held = max(1, min(ROWS_PER_GROUP, _ROWS_HELD // joined))
        self._held = lru_cache(maxsize=1)(self._read_means)

    def names(self) -> dict[str, str]:
        # Reads the whole table, and so checks the checksums of its pages.
        names: dict[str, str] = {}
        with _damage(self.path):
            for number, (identifier, name, residues, layer) in enumerate(self._rows()):
                place = number % len(self._layers)
                if layer != self._layers[place] or (place and names.get(identifier) != name):
                    raise ValueError("it has other layers")
                names[identifier] = name
                if not place:
                    self._first_row.setdefault(name, (number, residues))
            if self._metadata.num_rows % len(self._layers):
                raise ValueError("layers are missing")
        return names

    def _rows(self) -> Iterator[tuple[str, str, int, int]]:
        with self._open() as file:
            schema = file.schema_arrow
            if not schema.equals(_schema(schema.field("mean").type.list_size, {})):
                raise ValueError("it has other columns")
            for batch in file.iter_batches():
                if any(column.null_count for column in batch.columns):
                    raise ValueError("cells are empty")
                yield from zip(*(batch.column(number).to_pylist() for number in range(4)), strict=True)

    def _open(self) -> Any:
        # For a moment: more tables may be joined than may be open.
        return pyarrow().parquet.ParquetFile(self.path, metadata=self._metadata, page_checksum_verification=True)

    def holds(self, name: str, key: str) -> bool | None:
        return name in self._first_row or None

    def read(self, name: str) -> Entry:
        first, residues = self._first_row[name]
        means = {f"mean_representations.{layer}": self._mean(first + place) for place, layer in enumerate(self._layers)}
        return Entry(means, residues=residues)

    def _mean(self, row: int) -> Array:
        group = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[group - 1]) if group else 0
        part, place = divmod(row - begin, self._rows_held)
        mean: Array = self._held(group, part)[place]
        return mean

    def _read_means(self, group: int, part: int) -> Array:
        """The means of a part of a group of rows, [rows, hidden_size]."""
        with self._open() as file:
            column = file.read_row_group(group, ["mean"]).column("mean").combine_chunks()
        means = np.asarray(column.flatten()).reshape(len(column), -1)
        return means[self._rows_held * part :][: self._rows_held].copy()

    @staticmethod
    def check(out: Path, include: Sequence[str]) -> None:
        pyarrow()
        if set(include) != {"mean"}:
            raise ValueError(f"a Parquet file holds means: give `include` mean, not {' '.join(include)}")
        if out.exists() and out.stat().st_size and not is_parquet(out):
            raise ValueError(f"{out}: exists and is not a Parquet file; give another file")

    @staticmethod
    def write(
        path: Path, settings: Mapping[str, Any], names: Mapping[str, str], read: Callable[[str], Entry | None]
    ) -> None:
        arrow, layers, writer = pyarrow(), settings["repr_layers"], None
        entries = ((one, name, entry) for one, name in names.items() if (entry := read(name)) is not None)
        with contextlib.ExitStack() as opened:
            opened.enter_context(file_errors(path))
            while group := list(islice(entries, max(1, ROWS_PER_GROUP // len(layers)))):
                means = np.stack(
                    [entry.arrays[f"mean_representations.{layer}"] for *_, entry in group for layer in layers]
                )
                schema = _schema(means.shape[1], settings)
                columns = [
                    [one for one, *_ in group for _ in layers],
                    [name for _, name, _ in group for _ in layers],
                    [entry.residues for *_, entry in group for _ in layers],
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
