"""Embeddings that exist, in any of the formats that they are written in: read again, described, and joined."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from esm_turbo.files.kinds import INDEX_FILE
from esm_turbo.files.writing import replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding import h5, parquet
from esm_turbo.tasks.embedding.files import (
    Arrays,
    Entry,
    check_same_settings,
    read_entry,
    read_settings,
    sequence_hash,
)
from esm_turbo.tasks.embedding.index import EmbeddingIndex
from esm_turbo.tasks.embedding.one_file import OneFileFormat

ONE_FILE_FORMATS: dict[EmbeddingFormat, OneFileFormat] = {"h5": h5, "parquet": parquet}
"""Formats of embeddings that are one file."""


def read_embeddings(
    out: str | os.PathLike[str], file_format: EmbeddingFormat, records: Sequence[ProteinRecord]
) -> Iterator[Arrays]:
    """Yield the results of records that were embedded, by flat name such as `mean_representations.12`.

    Args:
        out: a folder, or for `h5` and `parquet` a file.
        file_format: how they were written.
        records: proteins that it holds.

    Raises:
        ValueError: a file is damaged, or a record is missing.
    """
    out = Path(out)
    if file_format in ONE_FILE_FORMATS:
        found = ONE_FILE_FORMATS[file_format].find(out, [sequence_hash(record.sequence) for record in records])
    else:
        files = {identifier: file for identifier, _, file, _ in EmbeddingIndex(out / INDEX_FILE).rows}
        found = (read_entry(out / files[record.id]).arrays for record in records)
    for record in records:
        try:
            arrays = next(found)
        except KeyError as error:
            raise ValueError(f"{out}: holds no embedding of {record.id!r}; embed it first") from error
        yield arrays


def embeddings_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of the embeddings in a folder or an HDF5 file, and their number of proteins.

    Raises:
        ValueError: they are damaged, or not of this package.
        ImportError: h5py is missing.
    """
    path = Path(path)
    if path.is_dir():
        settings, proteins = read_settings(path), len(list(EmbeddingIndex(path / INDEX_FILE).rows))
    else:
        settings, proteins = h5.settings(path), h5.proteins(path)
    # The options of caches are not a cache.
    settings = {"cache_options" if name == "cache" else name: one for name, one in settings.items()}
    return {"kind": "embeddings", "proteins": proteins, "format": settings.pop("format", "h5"), **settings}


def merge_files(
    file_format: EmbeddingFormat, out: Path, paths: Sequence[Path], orders: Sequence[Sequence[int]]
) -> None:
    """Join HDF5 files, or tables of means, of which few rows are in memory at a time.

    Args:
        file_format: `h5` or `parquet`.
        out: the file to write; if it exists, its entries of other proteins are kept, and come first.
        paths: of the files.
        orders: for every table, the numbers of its proteins, ascending; the joined rows are in their order.

    Raises:
        ValueError: the settings differ, a table does not hold the proteins of its numbers, or `out` is a file of
            another kind.
        ImportError: h5py or pyarrow is missing.
        OSError: the file cannot be written.
    """
    kind = ONE_FILE_FORMATS[file_format]
    settings = kind.settings(paths[0])
    kind.check(out, settings["include"])
    exists = out.exists() and out.stat().st_size > 0
    for path in [*paths, *([out] if exists else [])]:
        check_same_settings(path, kind.settings(path), settings)

    def kept() -> Iterator[tuple[list[str], Entry]]:
        joined = {identifier for path in paths for identifiers, _ in kind.read(path) for identifier in identifiers}
        for identifiers, entry in kind.read(out):
            if others := [identifier for identifier in identifiers if identifier not in joined]:
                yield others, entry

    if kind.in_order:
        tables = (_numbered(kind, path, order, len(paths)) for path, order in zip(paths, orders, strict=True))
        added = (row for _, row in heapq.merge(*tables, key=itemgetter(0)))
    else:
        added = (row for path in paths for row in kind.read(path))
    with replacing(out) as temporary:
        entries = chain(kept() if exists else (), added)
        kind.write(temporary, settings, ((identifiers, entry) for identifiers, entry in entries if entry.arrays))


def _numbered(
    kind: OneFileFormat, path: Path, order: Sequence[int], joined: int
) -> Iterator[tuple[int, tuple[list[str], Entry]]]:
    """Entries of a file with the numbers of their proteins."""
    last = -1
    for number, row in zip_longest(order, kind.read(path, joined)):
        if number is None or row is None or number <= last:
            raise ValueError(f"{path}: does not hold the proteins that its manifest names; run the shard again")
        last = number
        yield number, row
