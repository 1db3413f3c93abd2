"""Read embeddings again, in any of the formats that they are written in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.files import index_rows, pt_tensors, read_embedding, read_pt
from esm_turbo.tasks.embedding.h5 import H5File
from esm_turbo.tasks.embedding.one_file import Arrays, EmbeddingFile
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
    with contextlib.ExitStack() as opened:
        if file_format in ONE_FILE_KINDS:
            file = opened.enter_context(contextlib.closing(ONE_FILE_KINDS[file_format](Path(out))))
            names = file.names()
        else:
            names = {identifier: name for identifier, _, name, _ in index_rows(Path(out))}
        for record in records:
            if record.id not in names:
                raise ValueError(f"{os.fspath(out)}: holds no embedding of {record.id!r}; embed it first")
            name = names[record.id]
            if file_format in ONE_FILE_KINDS:
                yield file.read(name).arrays
                continue
            path = Path(out) / name
            tensors = read_embedding(path)[1] if file_format == "safetensors" else pt_tensors(read_pt(path))
            yield {key: tensor.numpy() for key, tensor in tensors.items()}
