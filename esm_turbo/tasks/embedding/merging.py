"""Joining embeddings of several runs with the same settings: folders into one, and files of one kind into one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.files.arrow import pyarrow
from esm_turbo.files.kinds import INDEX_FILE, SETTINGS_FILE
from esm_turbo.files.writing import file_errors, link_file, only_writer, replacing
from esm_turbo.tasks.embedding.files import EmbeddingIndex, check_same_settings, read_settings
from esm_turbo.tasks.embedding.h5 import H5Output, check_h5, h5py
from esm_turbo.tasks.embedding.parquet import (
    check_parquet,
    means_schema,
    means_settings,
    means_writer,
    proteins_per_group,
)


def merge_embeddings(out: Path, folders: Sequence[Path], orders: Sequence[Sequence[int]]) -> None:
    """Join folders of embeddings, by links to their files where the file system allows them.

    Args:
        out: the folder to write; if it exists, its embeddings are kept.
        folders: of the embeddings.
        orders: for every folder, the numbers of its proteins in the order of its index; the joined index is in the
            order of the numbers.

    Raises:
        ValueError: the settings differ, or another process is writing to `out`.
        OSError: a file cannot be written.
    """
    settings = read_settings(folders[0])
    with only_writer(out):
        if (out / SETTINGS_FILE).exists():
            check_same_settings(out, read_settings(out), settings)
        index = EmbeddingIndex(out / INDEX_FILE)
        identifiers: dict[int, str] = {}
        for folder, order in zip(folders, orders, strict=True):
            check_same_settings(folder, read_settings(folder), settings)
            for number, (identifier, residues, *names) in zip(
                order, EmbeddingIndex(folder / INDEX_FILE).rows, strict=True
            ):
                for name in filter(None, names):
                    link_file(folder / name, out / name)
                index.add(identifier, int(residues), names)
                identifiers[number] = identifier
        link_file(folders[0] / SETTINGS_FILE, out / SETTINGS_FILE)
        index.commit()
        index.sort([identifier for _, identifier in sorted(identifiers.items())])


def merge_h5(out: Path, paths: Sequence[Path]) -> None:
    """Join HDF5 files of embeddings.

    Args:
        out: the file to write; if it exists, its entries are kept.
        paths: of the files.

    Raises:
        ValueError: the settings differ, or `out` is a file of another kind.
        ImportError: h5py is missing.
        OSError: the file cannot be written.
    """
    check_h5(out)
    sources = [*paths, *([out] if out.exists() and out.stat().st_size else [])]
    settings: dict[str, Any] = {}
    with (
        replacing(out) as temporary,
        H5Output(temporary) as opened,
        h5py().File(opened, "w", libver=("v108", "v110")) as new,
    ):
        for path in sources:
            with h5py().File(path, "r") as old:
                own = json.loads(old.attrs["settings"])
                settings = settings or own
                check_same_settings(path, own, settings)
                for name in old:
                    if name not in new:
                        old.copy(name, new)
        new.attrs["settings"] = json.dumps(settings)


def merge_parquet(out: Path, paths: Sequence[Path], orders: Sequence[Sequence[int]], at_once: int = 64) -> None:
    """Join tables of means, in pieces that fit into memory.

    Args:
        out: the file to write; if it exists, its rows of other proteins are kept, and come first.
        paths: of the tables.
        orders: for every table, the numbers of its proteins, ascending; the joined rows are in their order.
        at_once: number of tables that are open at once; more are joined in several rounds, beside `out`.

    Raises:
        ValueError: the settings differ, a table does not hold the proteins of its numbers, or `out` is a file of
            another kind.
        ImportError: pyarrow is missing.
        OSError: the file cannot be written.
    """
    settings = means_settings(paths[0])
    check_parquet(out, settings["include"])
    kept: list[_Rows] = []
    if out.exists() and out.stat().st_size:
        check_same_settings(out, means_settings(out), settings)
        kept = [_Rows(out, without={one for path in paths for one in _identifiers(path)})]
        kept[0].numbers = np.arange(-(kept[0].left // len(settings["repr_layers"])), 0)
    with replacing(out) as temporary, file_errors(out):
        joined = 0
        while len(paths) > at_once:
            first = [_shard(*one, settings) for one in zip(paths[:at_once], orders, strict=False)]
            part = temporary.with_name(f"{joined}.parquet")
            # At the end, so that the parts of a round are joined before those of the next.
            numbers = _join(part, first, settings)
            paths, orders = [*paths[at_once:], part], [*orders[at_once:], numbers]
            joined += 1
        _join(temporary, [*(_shard(*one, settings) for one in zip(paths, orders, strict=True)), *kept], settings)


class _Rows:
    """Rows of a table of means, taken from its beginning.

    Args:
        path: of the table.
        without: identifiers whose rows are left out.

    Attributes:
        numbers: of its proteins, by which tables are joined.
        left: number of rows that were not taken yet.
    """

    numbers: npt.NDArray[np.int64]

    def __init__(self, path: Path, without: Container[str] = ()) -> None:
        self._keep = np.array([one not in without for one in _identifiers(path)], bool)
        self.left = int(self._keep.sum())
        self.file = pyarrow().parquet.ParquetFile(path, page_checksum_verification=True)
        self._batches = self.file.iter_batches(proteins_per_group(1))
        self._read = 0
        self._rest: Any = None

    def take(self, count: int) -> list[Any]:
        """The next rows, as record batches."""
        taken = []
        self.left -= count
        while count:
            if self._rest is None or not len(self._rest):
                batch = next(self._batches)
                keep = self._keep[self._read : self._read + len(batch)]
                self._read += len(batch)
                self._rest = batch if keep.all() else batch.filter(pyarrow().array(keep))
                continue
            taken.append(self._rest.slice(0, count))
            count -= len(taken[-1])
            self._rest = self._rest.slice(len(taken[-1]))
        return taken


def _shard(path: Path, order: Sequence[int], settings: Mapping[str, Any]) -> _Rows:
    """The rows of a table that holds the proteins of these numbers.

    Raises:
        ValueError: it does not, or was made with other settings.
    """
    check_same_settings(path, means_settings(path), settings)
    rows = _Rows(path)
    rows.numbers = np.asarray(order)
    if rows.left != len(settings["repr_layers"]) * len(order) or any(np.diff(rows.numbers) <= 0):
        raise ValueError(f"{path}: does not hold the proteins that its manifest names; run the shard again")
    return rows


def _join(path: Path, sources: Sequence[_Rows], settings: Mapping[str, Any]) -> Sequence[int]:
    """Write the rows of tables by the numbers of their proteins; returns the numbers, ascending."""
    arrow, per_protein = pyarrow(), len(settings["repr_layers"])
    numbers = np.concatenate([source.numbers for source in sources])
    by_number = np.argsort(numbers, kind="stable")
    # By their numbers, which table has the protein.
    owner = np.repeat(np.arange(len(sources)), [len(source.numbers) for source in sources])[by_number]
    hidden_size = sources[0].file.schema_arrow.field("mean").type.list_size
    schema = means_schema(hidden_size, settings)
    per_group = proteins_per_group(per_protein)
    with contextlib.ExitStack() as opened, means_writer(path, schema) as writer:
        for source in sources:
            opened.callback(source.file.close, force=True)
        for begin in range(0, len(owner), per_group):
            owners = np.repeat(owner[begin : begin + per_group], per_protein)
            counts = np.bincount(owners, minlength=len(sources))
            taken = [source.take(count) for source, count in zip(sources, counts.tolist(), strict=True)]
            # Row j of the tables one after another belongs to place[j] of the output.
            place = np.argsort(owners, kind="stable")
            table = arrow.Table.from_batches(chain.from_iterable(taken), schema=schema)
            writer.write_table(table.take(np.argsort(place)).combine_chunks())
    ordered: Sequence[int] = numbers[by_number].tolist()
    return ordered


def _identifiers(path: Path) -> list[str]:
    """The identifiers in the rows of a table of means."""
    identifiers: list[str] = pyarrow().parquet.read_table(path, columns=["id"]).column("id").to_pylist()
    return identifiers
