"""Embeddings in one HDF5 file, as biotrainer reads them: one entry per sequence, named by its hash.

An entry is a data set if one result is requested, and otherwise a group of data sets. Its attribute `original_id` is
the protein's identifier; `other_ids` lists further proteins with the same sequence; `sha256` is a checksum of its
content. The functions are those of a `OneFileFormat`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.extras import import_extra
from esm_turbo.files.kinds import is_h5
from esm_turbo.tasks.embedding.files import Arrays, Row


def check(out: Path, include: Sequence[str]) -> None:
    """Check that a file may be written, and holds these results."""
    h5py()
    if "cache" in include:
        raise ValueError("caches cannot be stored in an HDF5 file: use `format` safetensors or pt")
    if out.exists() and out.stat().st_size and not is_h5(out):
        raise ValueError(f"{out}: exists and is not an HDF5 file; give another file")


def settings(path: Path) -> dict[str, Any]:
    """The settings of the embeddings in a file."""
    with _opened(path) as file:
        try:
            found: dict[str, Any] = json.loads(file.attrs["settings"])
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{path}: holds no embeddings of esm-turbo; give another file") from None
    return found


def names(path: Path) -> dict[str, str]:
    """The entry of each identifier, after its checksum is verified."""
    found: dict[str, str] = {}
    with _opened(path) as file:
        for name in file:
            try:
                if file[name].attrs["sha256"] != _digest(_arrays(file[name])):
                    raise ValueError("an entry was altered")
                found |= dict.fromkeys(_identifiers(file[name]), name)
            except MemoryError:
                raise
            # A damaged structure can make h5py raise almost any other exception.
            except Exception as error:
                raise ArtifactError(f"{path}: damaged ({name}: {error})") from error
    return found


def proteins(path: Path) -> int:
    """Number of proteins of a file."""
    with _opened(path) as file:
        try:
            return sum(len(_identifiers(entry)) for entry in file.values())
        except KeyError as error:
            raise ArtifactError(f"{path}: damaged ({error})") from error


def write(path: Path, settings: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Write a file."""
    others: dict[str, list[str]] = {}
    try:
        # Attributes above 64 KiB need the file format of HDF5 1.8.
        with _Output(path) as out, h5py().File(out, "w", libver=("v108", "v110")) as file:
            file.attrs["settings"] = json.dumps(dict(settings))
            for identifier, name, _, arrays in rows:
                if name in others:
                    others[name].append(identifier)
                    continue
                for key, array in arrays.items():
                    file.create_dataset(name if len(arrays) == 1 else f"{name}/{key.replace('.', '/')}", data=array)
                file[name].attrs.update({"sha256": _digest(arrays), "original_id": identifier})
                others[name] = []
            for name, identifiers in others.items():
                if identifiers:
                    file[name].attrs["other_ids"] = identifiers
    except RuntimeError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def _identifiers(entry: Any) -> list[str]:
    return [entry.attrs["original_id"], *entry.attrs.get("other_ids", [])]


def _arrays(entry: Any) -> Arrays:
    """Results of an entry by flat name; that of a data set needs none."""
    if isinstance(entry, h5py().Dataset):
        return {"": entry[()]}
    arrays: Arrays = {}

    def visit(path: str, node: Any) -> None:
        if isinstance(node, h5py().Dataset):
            arrays[path.replace("/", ".")] = node[()]

    entry.visititems(visit)
    return arrays


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file that is read; what keeps it from being read is damage."""
    try:
        with h5py().File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{path}: damaged ({error})") from error


class _Output(io.FileIO):
    """A file that HDF5 writes; its first error is raised when it is closed.

    HDF5 writes most at its own end, and h5py prints errors there instead of raising them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._path = path
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of the data; after an error, do nothing."""
        left = memoryview(data).cast("B")
        size = len(left)
        while self._error is None and left:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                self._error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        """Set the size; after an error, do nothing."""
        try:
            return super().truncate(size) if self._error is None else 0
        except OSError as error:
            self._error = error
            return 0

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: something was not written.
        """
        super().close()
        error, self._error = self._error, None
        if error is not None:
            raise OSError(error.errno, os.strerror(error.errno or 0), os.fspath(self._path))


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name if len(arrays) > 1 else ''} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.data)
    return digest.hexdigest()


def h5py() -> Any:
    """The package h5py.

    Raises:
        ImportError: it is missing.
    """
    return import_extra("h5py", "h5", "format h5 needs")
