"""Embeddings in one HDF5 file, as biotrainer reads them: an entry a sequence, named by its hash.

An entry is a data set where one thing is asked for, else a group of them. Its attribute `original_id` is the protein's
identifier; further proteins of the same sequence stand in `other_ids`. Its attribute `sha256` is a checksum of what it
holds.

An HDF5 file that is being written is lost when its process dies. So a run writes single files into a hidden folder
beside it, which the next run goes on with, and makes the HDF5 file of them at its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.files.writing import file_errors, remove_temporaries, replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.embed import ProteinEmbedding
from esm_turbo.tasks.embedding.files import (
    EmbeddingWriter,
    FolderWriter,
    SameSequence,
    check_same_settings,
    read_embedding,
    sequence_hash,
)

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_Arrays = dict[str, npt.NDArray[np.float32]]


def parts_folder(out: Path) -> Path:
    """Where the embeddings of an unfinished file are."""
    return out.parent / f".{out.name}.parts"


def check_h5(out: Path) -> None:
    """Makes sure, before any work, that an HDF5 file can be written, and that no file of another kind is overwritten.

    Raises:
        ValueError: there is a file of another kind.
        ImportError: h5py is missing.
    """
    _h5py()
    if out.exists():
        with out.open("rb") as file:
            begin = file.read(len(_SIGNATURE))
        if begin not in (_SIGNATURE, b""):
            raise ValueError(f"{out}: is there and no HDF5 file; give another file")


class H5Writer(EmbeddingWriter):
    """One HDF5 file for all.

    Args:
        out: the file; what it holds already is kept.
        parts: where embeddings are written first.
        settings: see `embedding_run.embedding_writer`.

    Raises:
        ValueError: the file holds embeddings made with other settings, or no such embeddings.
    """

    def __init__(self, out: Path, parts: FolderWriter, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.out = out
        self.parts = parts
        self.settings = dict(settings)
        self._entry_of: dict[str, str] = {}
        self._unusable: set[str] = set()
        self._changed = False
        remove_temporaries(out.parent, f".{out.name}.")
        self._old = self._open()
        if self._old is not None:
            self._check_settings()
            self._read_identifiers()
        for identifier, _, file, _ in parts.index.rows:
            self._assign(identifier, file.removesuffix(".safetensors"))

    def close(self) -> None:
        """Closes the file that was there."""
        if self._old is not None:
            self._old.close()

    def has(self, proteins: SameSequence) -> bool:
        name = sequence_hash(proteins[0].sequence)
        if not self._holds(name) and not self.parts.has(proteins):
            return False
        self._assign_all(proteins, name)
        return True

    def write(self, proteins: SameSequence, embedding: ProteinEmbedding) -> None:
        self.parts.write(proteins, embedding)
        self._assign_all(proteins, sequence_hash(proteins[0].sequence))

    def commit(self) -> None:
        self.parts.commit()

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        self.commit()
        if self._changed or self._unusable:
            with file_errors(self.out), replacing(self.out) as temporary:
                self._assemble(temporary)
        shutil.rmtree(self.parts.folder)

    def _assemble(self, path: Path) -> None:
        identifiers: dict[str, list[str]] = {}
        for identifier, name in self._entry_of.items():
            identifiers.setdefault(name, []).append(identifier)
        # Of version 1.8 and later, whose attributes may be long.
        with _h5py().File(path, "w", libver=("v108", "v110")) as new:
            new.attrs["settings"] = json.dumps(self.settings)
            for name, (first, *others) in identifiers.items():
                if self._old is not None and name in self._old and name not in self._unusable:
                    self._old.copy(name, new)
                elif (self.parts.folder / _part(name)).exists():
                    _, tensors = read_embedding(self.parts.folder / _part(name))
                    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
                    _put(new, name, arrays)
                    new[name].attrs["sha256"] = _digest(arrays)
                else:
                    # Damaged, and it could not be made anew.
                    continue
                attributes = new[name].attrs
                attributes["original_id"] = first
                attributes.pop("other_ids", None)
                if others:
                    attributes["other_ids"] = others

    def _holds(self, name: str) -> bool:
        """Whether the finished file has a good entry of this name."""
        if self._old is None or name in self._unusable or name not in self._old:
            return False
        try:
            entry = self._old[name]
            if entry.attrs["sha256"] == _digest(_get(entry)):
                return True
        except Exception:
            # h5py raises whatever a damaged structure makes it stumble over.
            pass
        self._set_unusable(name)
        return False

    def _set_unusable(self, name: str) -> None:
        self._unusable.add(name)
        self.damaged.append(f"{self.out}, entry {name}")

    def _assign_all(self, proteins: SameSequence, name: str) -> None:
        for record in proteins:
            self._assign(record.id, name)

    def _assign(self, identifier: str, name: str) -> None:
        # An identifier that has another sequence now is taken from the entry that it had.
        self._changed |= self._entry_of.get(identifier) != name
        self._entry_of[identifier] = name

    def _open(self) -> Any:
        """The finished file, or None where there is none that can be opened."""
        if not self.out.exists():
            return None
        try:
            return _h5py().File(self.out, "r")
        except OSError:
            self.damaged.append(os.fspath(self.out))
            self._changed = True
            return None

    def _check_settings(self) -> None:
        try:
            there = json.loads(self._old.attrs["settings"])
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{self.out}: holds no embeddings of esm-turbo; give another file") from None
        check_same_settings(self.out, there, self.settings)

    def _read_identifiers(self) -> None:
        for name in self._old:
            try:
                attributes = self._old[name].attrs
                identifiers = [attributes["original_id"], *attributes.get("other_ids", [])]
            except Exception:
                self._set_unusable(name)
                continue
            self._entry_of |= dict.fromkeys(identifiers, name)


def _part(name: str) -> str:
    return f"{name}.safetensors"


def _put(file: Any, name: str, arrays: _Arrays) -> None:
    if len(arrays) == 1:
        [array] = arrays.values()
        file.create_dataset(name, data=array)
        return
    for key, array in arrays.items():
        file.create_dataset(f"{name}/{key.replace('.', '/')}", data=array)


def _get(entry: Any) -> _Arrays:
    """The arrays of an entry; their names matter where there are several."""
    if isinstance(entry, _h5py().Dataset):
        return {"": entry[()]}
    found: _Arrays = {}

    def visit(path: str, node: Any) -> None:
        if isinstance(node, _h5py().Dataset):
            found[path.replace("/", ".")] = node[()]

    entry.visititems(visit)
    return found


def _digest(arrays: _Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name if len(arrays) > 1 else ''} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("format h5 needs h5py: pip install 'esm-turbo[h5]'") from error
    return h5py
