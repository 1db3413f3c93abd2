"""Embeddings in one HDF5 file, as biotrainer reads them: one entry per sequence, named by its hash.

An entry is a data set if one result is requested, and otherwise a group of data sets. Its attribute `original_id` is
the protein's identifier; `other_ids` lists further proteins with the same sequence; `key` is a hash of the sequence and
the settings, as in the other formats; `sha256` is a checksum of its content.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.kinds import is_h5
from esm_turbo.tasks.embedding.files import check_same_settings, described, read_embedding
from esm_turbo.tasks.embedding.one_file import OneFileWriter

_Arrays = dict[str, npt.NDArray[np.float32]]


def check_h5(out: Path) -> None:
    """Check, before any work is done, that an HDF5 file can be written and no other file is overwritten.

    Raises:
        ValueError: the path is a file of another kind.
        ImportError: h5py is missing.
    """
    h5py()
    if out.exists() and out.stat().st_size and not is_h5(out):
        raise ValueError(f"{out}: exists and is not an HDF5 file; give another file")


def open_h5(path: str | os.PathLike[str]) -> Any:
    """An HDF5 file, open for reading.

    Raises:
        ImportError: h5py is missing.
    """
    return h5py().File(path, "r")


def h5_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of the embeddings in an HDF5 file, and their number of proteins.

    Raises:
        ArtifactError: (a ValueError) the file is damaged, or holds no embeddings of this package.
        ImportError: h5py is missing.
    """
    try:
        with h5py().File(path, "r") as file:
            text = file.attrs.get("settings")
            if text is None:
                raise ArtifactError(f"{os.fspath(path)}: holds no embeddings of esm-turbo")
            proteins = sum(1 + len(entry.attrs.get("other_ids", ())) for entry in file.values())
            return described("h5", proteins, json.loads(text))
    except ArtifactError:
        raise
    except ImportError:
        raise
    # A damaged structure can make h5py raise almost any exception.
    except Exception as error:
        raise ArtifactError(f"{os.fspath(path)}: damaged ({error})") from error


class H5Writer(OneFileWriter):
    """Writes one HDF5 file for all sequences, see `OneFileWriter`."""

    _old: Any

    def close(self) -> None:
        if self._old is not None:
            self._old.close()

    def _read_existing(self) -> None:
        self._old = self._open()
        if self._old is None:
            return
        try:
            existing = json.loads(self._old.attrs["settings"])
            names = list(self._old)
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{self.out}: holds no embeddings of esm-turbo; give another file") from None
        except (OSError, RuntimeError):
            # As damaged as a file that cannot be opened.
            self.close()
            self._old = None
            self._set_damaged()
        else:
            check_same_settings(self.out, existing, self._content)
            self._read_identifiers(names)

    def _assemble(self, path: Path) -> None:
        identifiers: dict[str, list[str]] = {}
        for identifier, name in self._entry_of.items():
            identifiers.setdefault(name, []).append(identifier)
        # Attributes above 64 KiB need the file format of HDF5 1.8.
        with H5Output(path) as out, h5py().File(out, "w", libver=("v108", "v110")) as new:
            new.attrs["settings"] = json.dumps(self._content | self.recorded)
            for name, (first, *others) in identifiers.items():
                if self._old is not None and name in self._old and name not in self._unusable:
                    self._old.copy(name, new)
                elif (part := self.folder / f"{name}.safetensors").exists():
                    metadata, tensors = read_embedding(part)
                    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
                    _put(new, name, arrays)
                    new[name].attrs["sha256"] = _digest(arrays)
                    new[name].attrs["key"] = metadata["key"]
                else:
                    # A damaged entry that could not be computed again.
                    continue
                attributes = new[name].attrs
                attributes["original_id"] = first
                attributes.pop("other_ids", None)
                if others:
                    attributes["other_ids"] = others

    def _holds(self, name: str, key: str) -> bool:
        if self._old is None or name in self._unusable or name not in self._old:
            return False
        try:
            entry = self._old[name]
            if entry.attrs["key"] == key and entry.attrs["sha256"] == _digest(h5_arrays(entry)):
                return True
        except Exception:
            # A damaged structure can make h5py raise almost any exception.
            pass
        self._set_unusable(name)
        return False

    def _set_unusable(self, name: str) -> None:
        self._unusable.add(name)
        self.damaged.append(f"{self.out}, entry {name}")

    def _open(self) -> Any:
        """The existing file; None if there is none, or it cannot be opened."""
        if not self.out.exists():
            return None
        try:
            return h5py().File(self.out, "r")
        except OSError:
            self._set_damaged()
            return None

    def _read_identifiers(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                attributes = self._old[name].attrs
                identifiers = [attributes["original_id"], *attributes.get("other_ids", [])]
            except Exception:
                self._set_unusable(name)
                continue
            self._entry_of |= dict.fromkeys(identifiers, name)


class H5Output(io.FileIO):
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


def _put(file: Any, name: str, arrays: _Arrays) -> None:
    if len(arrays) == 1:
        [array] = arrays.values()
        file.create_dataset(name, data=array)
        return
    for key, array in arrays.items():
        file.create_dataset(f"{name}/{key.replace('.', '/')}", data=array)


def h5_arrays(entry: Any) -> _Arrays:
    """The arrays of an entry by name; a single array has no name."""
    if isinstance(entry, h5py().Dataset):
        return {"": entry[()]}
    arrays: _Arrays = {}

    def visit(path: str, node: Any) -> None:
        if isinstance(node, h5py().Dataset):
            arrays[path.replace("/", ".")] = node[()]

    entry.visititems(visit)
    return arrays


def _digest(arrays: _Arrays) -> str:
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
    try:
        import h5py
    except ImportError as error:
        raise ImportError("format h5 needs h5py: pip install 'esm-turbo[h5]'") from error
    return h5py
