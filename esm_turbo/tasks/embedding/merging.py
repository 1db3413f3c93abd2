"""Joining embeddings of several runs with the same settings: folders into one, HDF5 files into one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esm_turbo.files.kinds import INDEX_FILE, SETTINGS_FILE
from esm_turbo.files.writing import link_file, only_writer, replacing
from esm_turbo.tasks.embedding.files import EmbeddingIndex, check_same_settings, read_settings
from esm_turbo.tasks.embedding.h5 import H5Output, check_h5, h5py


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
