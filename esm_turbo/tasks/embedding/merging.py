"""Joining embeddings of several runs with the same settings: folders into one, and files of one kind into one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from esm_turbo.files.kinds import INDEX_FILE, SETTINGS_FILE
from esm_turbo.files.writing import link_file, only_writer, replacing
from esm_turbo.tasks.embedding.files import check_same_settings, read_settings
from esm_turbo.tasks.embedding.h5 import H5File, h5_output, h5py
from esm_turbo.tasks.embedding.index import EmbeddingIndex
from esm_turbo.tasks.embedding.parquet import ROWS_PER_GROUP, MeansFile

# Of all tables that are joined: some 300 MB of the largest checkpoints' means.
_ROWS_HELD = 65_536


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
    H5File.check(out, ())
    sources = [*paths, *([out] if out.exists() and out.stat().st_size else [])]
    settings: dict[str, Any] = {}
    with replacing(out) as temporary, h5_output(temporary) as new:
        for path in sources:
            with h5py().File(path, "r") as old:
                own = json.loads(old.attrs["settings"])
                settings = settings or own
                check_same_settings(path, own, settings)
                for name in old:
                    if name not in new:
                        old.copy(name, new)
        new.attrs["settings"] = json.dumps(settings)


def merge_parquet(out: Path, paths: Sequence[Path], orders: Sequence[Sequence[int]]) -> None:
    """Join tables of means, of which few rows are in memory at a time.

    Args:
        out: the file to write; if it exists, its rows of other proteins are kept, and come first.
        paths: of the tables.
        orders: for every table, the numbers of its proteins, ascending; the joined rows are in their order.

    Raises:
        ValueError: the settings differ, a table does not hold the proteins of its numbers, or `out` is a file of
            another kind.
        ImportError: pyarrow is missing.
        OSError: the file cannot be written.
    """
    sources = [MeansFile(path, max(1, min(ROWS_PER_GROUP, _ROWS_HELD // len(paths)))) for path in paths]
    settings = sources[0].settings
    MeansFile.check(out, settings["include"])
    found: dict[int, tuple[str, str, MeansFile]] = {}
    for source, order in zip(sources, orders, strict=True):
        check_same_settings(source.path, source.settings, settings)
        names = source.names()
        if len(names) != len(order) or any(second <= first for first, second in pairwise(order)):
            raise ValueError(f"{source.path}: does not hold the proteins that its manifest names; run the shard again")
        found |= {number: (*one, source) for number, one in zip(order, names.items(), strict=True)}
    rows = [found[number] for number in sorted(found)]
    if out.exists() and out.stat().st_size:
        old, joined = MeansFile(out), {identifier for identifier, *_ in rows}
        check_same_settings(out, old.settings, settings)
        rows = [(*one, old) for one in old.names().items() if one[0] not in joined] + rows
    source_of = {name: source for _, name, source in rows}
    with replacing(out) as temporary:
        names = {identifier: name for identifier, name, _ in rows}
        MeansFile.write(temporary, settings, names, lambda name: source_of[name].read(name))
