"""Embeddings in one HDF5 file, as biotrainer reads them: one entry per sequence, named by its hash.

An entry is a data set if one result is requested, and otherwise a group of data sets. Its attribute `original_id` is
the protein's identifier; `other_ids` lists further proteins with the same sequence; `key` is a hash of the sequence and
the settings, as in the other formats; `sha256` is a checksum of its content.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.extras import import_extra
from esm_turbo.files.kinds import is_h5
from esm_turbo.tasks.embedding.files import Arrays, Entry
from esm_turbo.tasks.embedding.one_file import EmbeddingFile
from esm_turbo.tasks.embedding.request import RESULT_NAMES


class H5File(EmbeddingFile):
    """Embeddings in HDF5, see `EmbeddingFile`."""

    in_order = False

    def __init__(self, path: Path, joined: int = 1) -> None:
        self.path = path
        self._open_file: Any = None
        with _damage(path):
            try:
                self.settings = json.loads(self._file.attrs["settings"])
            except (KeyError, ValueError, TypeError):
                self.close()
                raise ValueError(f"{path}: holds no embeddings of esm-turbo; give another file") from None

    @property
    def _file(self) -> Any:
        if self._open_file is None:
            self._open_file = h5py().File(self.path, "r")
        return self._open_file

    def names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        with _damage(self.path):
            for name in self._file:
                try:
                    attributes = self._file[name].attrs
                    names |= dict.fromkeys([attributes["original_id"], *attributes.get("other_ids", [])], name)
                except MemoryError:
                    raise
                # A damaged structure can make h5py raise almost any exception; `holds` finds the entry.
                except Exception:
                    continue
        return names

    def holds(self, name: str, key: str) -> bool | None:
        try:
            if name not in self._file:
                return None
            attributes = self._file[name].attrs
            return bool(attributes["key"] == key and attributes["sha256"] == _digest(self.read(name).arrays))
        except MemoryError:
            raise
        except Exception:
            # As for `names`.
            return False

    def read(self, name: str) -> Entry:
        entry = self._file[name]
        arrays: Arrays = {}

        def visit(path: str, node: Any) -> None:
            if isinstance(node, h5py().Dataset):
                arrays[path.replace("/", ".")] = node[()]

        if isinstance(entry, h5py().Dataset):
            [kind], [*_, layer] = self.settings["include"], self.settings["repr_layers"]
            arrays[f"{RESULT_NAMES[kind]}{'' if kind == 'contacts' else f'.{layer}'}"] = entry[()]
        else:
            entry.visititems(visit)
        return Entry(arrays, str(entry.attrs.get("key", "")))

    def close(self) -> None:
        if self._open_file is not None:
            self._open_file.close()
        self._open_file = None

    @staticmethod
    def check(out: Path, include: Sequence[str]) -> None:
        h5py()
        if "cache" in include:
            raise ValueError("caches cannot be stored in an HDF5 file: use `format` safetensors or pt")
        if out.exists() and out.stat().st_size and not is_h5(out):
            raise ValueError(f"{out}: exists and is not an HDF5 file; give another file")

    @staticmethod
    def write(
        path: Path, settings: Mapping[str, Any], names: Mapping[str, str], read: Callable[[str], Entry | None]
    ) -> None:
        identifiers: defaultdict[str, list[str]] = defaultdict(list)
        for identifier, name in names.items():
            identifiers[name].append(identifier)
        # Attributes above 64 KiB need the file format of HDF5 1.8.
        with _Output(path) as out, h5py().File(out, "w", libver=("v108", "v110")) as file:
            file.attrs["settings"] = json.dumps(dict(settings))
            for name, (first, *others) in identifiers.items():
                if (entry := read(name)) is None:
                    continue
                single = len(entry.arrays) == 1
                for key, array in entry.arrays.items():
                    file.create_dataset(name if single else f"{name}/{key.replace('.', '/')}", data=array)
                attributes = {"sha256": _digest(entry.arrays), "key": entry.key, "original_id": first}
                file[name].attrs.update(attributes | ({"other_ids": others} if others else {}))


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


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{path}: damaged ({error})") from error


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
