"""Embeddings that exist, in any of the formats that they are written in: read again, and described."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from esm_turbo.files.kinds import INDEX_FILE
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding import h5
from esm_turbo.tasks.embedding.files import Arrays, read_entry, read_settings, sequence_hash
from esm_turbo.tasks.embedding.index import EmbeddingIndex
from esm_turbo.tasks.embedding.one_file import ONE_FILE_FORMATS


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
        found = (read_entry(out / files[record.id])[0] for record in records)
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
