"""Embeddings on disk: proteins to embed, digests of what is written, damage, and a full disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pytest

from esm_turbo.files import artifacts
from esm_turbo.files.kinds import INDEX_FILE
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord
from esm_turbo.tasks.embedding import files as part_files
from esm_turbo.tasks.embedding import folder, index, one_file
from esm_turbo.tasks.embedding.request import RESULT_NAMES

# Two or three proteins per batch, some of equal length, two of the same sequence.
LENGTHS = (5, 12, 12, 17, 18, 19, 26, 33, 34)
TOKS_PER_BATCH = 75


def proteins(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[ProteinRecord]:
    """Random proteins, and a twin of the fifth."""
    generator = random.Random(seed)
    records = [
        ProteinRecord(f"protein/{index}", "".join(generator.choices(STANDARD_RESIDUES, k=length)))
        for index, length in enumerate(lengths)
    ]
    return [*records, ProteinRecord("twin", records[4].sequence)]


def content(path: Path) -> str:
    """Digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder: Path) -> dict[str, str]:
    """Digests of all files of a folder by name."""
    return {str(p.relative_to(folder)): content(p) for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def h5_content(path: Path) -> dict[str, Any]:
    """Content of an HDF5 file: arrays as bytes and attributes, by name."""
    content = {}

    def visit(name: str, node: Any) -> None:
        content[name] = (
            node[()].tobytes() if isinstance(node, h5py.Dataset) else None,
            {key: np.asarray(value).tolist() for key, value in node.attrs.items()},
        )

    with h5py.File(path) as file:
        content["settings"] = json.loads(file.attrs["settings"])
        file.visititems(visit)
    return content


def read_embeddings(out: Path, records: Sequence[ProteinRecord]) -> Iterator[dict[str, Any]]:
    """Results of records by flat name, from a folder or a file."""
    names = [part_files.sequence_hash(record.sequence) for record in records]
    if out.is_dir():
        paths = {identifier: out / file for identifier, _, file, _ in index.EmbeddingIndex(out / INDEX_FILE).rows}
        yield from (part_files.read_entry(paths[record.id])[0] for record in records)
    elif out.suffix == ".parquet":
        means = pandas.read_parquet(out).drop_duplicates(["sequence_hash", "layer"]).set_index("sequence_hash")
        for name in names:
            yield {f"mean_representations.{row.layer}": row.mean for row in means.loc[[name]].itertuples()}
    else:
        with h5py.File(out) as file:
            settings = json.loads(file.attrs["settings"])
            for name in names:
                found: dict[str, Any] = {}
                if isinstance(file[name], h5py.Dataset):
                    kind = RESULT_NAMES[settings["include"][0]]
                    found[kind if kind == "contacts" else f"{kind}.{settings['repr_layers'][-1]}"] = file[name][()]
                else:
                    for kind, node in file[name].items():
                        layers = {kind: node} if kind == "contacts" else {f"{kind}.{x}": node[x] for x in node}
                        found |= {flat: data[()] for flat, data in layers.items()}
                yield found


def index_rows(folder: Path) -> list[list[str]]:
    """Rows of an index without their checksums: identifier, residues, and the files of embedding and cache."""
    return [line.split("\t")[:-1] for line in (Path(folder) / INDEX_FILE).read_text().splitlines()[1:]]


def ids_of(folder: Path) -> list[str]:
    """Identifiers of an index, in its order."""
    return [row[0] for row in index_rows(folder)]


def embedded_files(folder: Path) -> list[Path]:
    """Files of embeddings and caches in a folder."""
    return sorted(path for path in Path(folder).iterdir() if path.suffix in (".pt", ".safetensors"))


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Make the disk full after a number of files: half of the next one is written."""
    writes: list[Path] = []
    original = folder.replacing

    @contextlib.contextmanager
    def replacing(path: Path, **options: bool) -> Iterator[Path]:
        with original(path, **options) as temporary:
            writes.append(path)
            if len(writes) > after:
                temporary.write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
            yield temporary

    for module in (part_files, folder, index, artifacts, one_file):
        monkeypatch.setattr(module, "replacing", replacing)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _other(path: Path) -> None:
    path.write_text("not what it was\n")


DAMAGE: dict[str, Callable[[Path], None]] = {"flip": _flip, "cut": _cut, "empty": _empty, "other": _other}
"""Ways to damage a file."""
