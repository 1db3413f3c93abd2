"""Read embeddings again, in any of the formats that they are written in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.files import index_rows, read_embedding, read_pt, sequence_hash
from esm_turbo.tasks.embedding.h5 import h5_arrays, open_h5
from esm_turbo.tasks.embedding.parquet import read_means

Arrays = dict[str, npt.NDArray[np.float32]]


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
    if file_format == "h5":
        yield from _from_h5(out, records)
        return
    if file_format == "parquet":
        yield from read_means(out, records)
        return
    folder = Path(out)
    files = {identifier: name for identifier, _, name, _ in index_rows(folder)}
    for record in records:
        if record.id not in files:
            raise ValueError(f"{folder}: holds no embedding of {record.id!r}; embed it first")
        path = folder / files[record.id]
        if file_format == "safetensors":
            yield {name: tensor.numpy() for name, tensor in read_embedding(path)[1].items()}
        else:
            yield _flat(read_pt(path))


def _from_h5(out: str | os.PathLike[str], records: Sequence[ProteinRecord]) -> Iterator[Arrays]:
    with open_h5(out) as file:
        layers = json.loads(file.attrs["settings"])["repr_layers"]
        for record in records:
            name = sequence_hash(record.sequence)
            if name not in file:
                raise ValueError(f"{os.fspath(out)}: holds no embedding of {record.id!r}; embed it first")
            arrays = h5_arrays(file[name])
            if "" in arrays:
                # A single result has no name; of those of one axis, means are asked for.
                single = arrays.pop("")
                arrays["contacts" if single.ndim == 2 else f"mean_representations.{layers[-1]}"] = single
            yield arrays


def _flat(content: dict[str, Any]) -> Arrays:
    """Results of a file of torch.save, whose layers are dictionaries."""
    flat: Arrays = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{layer}": tensor.numpy() for layer, tensor in value.items()}
        elif hasattr(value, "numpy"):
            flat[name] = value.numpy()
    return flat
