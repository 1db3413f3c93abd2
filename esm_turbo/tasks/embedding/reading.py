"""Embeddings that exist, in any of the formats that they are written in: read again, described, and joined."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from esm_turbo.files.writing import replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.files import Arrays, Entry, check_same_settings
from esm_turbo.tasks.embedding.folder import EmbeddingFolder
from esm_turbo.tasks.embedding.h5 import H5File
from esm_turbo.tasks.embedding.one_file import EmbeddingFile
from esm_turbo.tasks.embedding.parquet import MeansFile

ONE_FILE_KINDS: dict[EmbeddingFormat, type[EmbeddingFile]] = {"h5": H5File, "parquet": MeansFile}
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
    with contextlib.closing(ONE_FILE_KINDS.get(file_format, EmbeddingFolder)(Path(out))) as source:
        names = source.names()
        for record in records:
            if record.id not in names:
                raise ValueError(f"{os.fspath(out)}: holds no embedding of {record.id!r}; embed it first")
            yield source.read(names[record.id]).arrays


def embeddings_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of the embeddings in a folder or an HDF5 file, and their number of proteins.

    Raises:
        ValueError: they are damaged, or not of this package.
        ImportError: h5py is missing.
    """
    kind = EmbeddingFolder if Path(path).is_dir() else H5File
    with contextlib.closing(kind(Path(path))) as source:
        # The options of caches are not a cache.
        settings = {"cache_options" if name == "cache" else name: one for name, one in source.settings.items()}
        proteins, file_format = len(source.names()), settings.pop("format", "h5")
    return {"kind": "embeddings", "proteins": proteins, "format": file_format, **settings}


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
    kind = ONE_FILE_KINDS[file_format]
    with contextlib.closing(kind(paths[0])) as first:
        settings = first.settings
    kind.check(out, settings["include"])
    found: dict[int, tuple[str, str, EmbeddingFile]] = {}
    for path, order in zip(paths, orders, strict=True):
        # There may be more files than may be open.
        with contextlib.closing(kind(path, len(paths))) as source:
            check_same_settings(path, source.settings, settings)
            names = source.names()
        if not kind.in_order:
            order = range(len(found), len(found) + len(names))
        if len(names) != len(order) or list(order) != sorted(set(order)):
            raise ValueError(f"{path}: does not hold the proteins that its manifest names; run the shard again")
        found |= {number: (*one, source) for number, one in zip(order, names.items(), strict=True)}
    rows = [found[number] for number in sorted(found)]
    if out.exists() and out.stat().st_size:
        joined = {identifier for identifier, *_ in rows}
        with contextlib.closing(kind(out)) as old:
            check_same_settings(out, old.settings, settings)
            rows = [(*one, old) for one in old.names().items() if one[0] not in joined] + rows
    source_of = {name: source for _, name, source in rows}
    last = first

    def read(name: str) -> Entry:
        nonlocal last
        if last is not source_of[name]:
            last.close()
            last = source_of[name]
        return last.read(name)

    with replacing(out) as temporary:
        kind.write(temporary, settings, {identifier: name for identifier, name, _ in rows}, read)
    last.close()
