"""Embeddings on disk: a folder of `.pt` or safetensors files with an index, or one HDF5 file.

Files and data sets are named by a hash of the sequence, never by an identifier, which may hold anything. Every file is
whole or absent. A folder holds the embeddings of one model and one choice of options, kept in `settings.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .artifacts import read_artifact, replacing, write_artifact
from .embedding import ProteinEmbedding
from .fasta import ProteinRecord
from .options import EmbeddingFormat
from .paths import check_writable

FORMAT_VERSION = 1
INDEX_FILE = "index.tsv"
SETTINGS_FILE = "settings.json"
_INDEX_HEADER = "id\tresidues\tembedding\tcache"


class EmbeddingWriter(ABC):
    """Writes the embeddings of proteins, one by one."""

    @abstractmethod
    def write(self, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        """Writes one protein's.

        Raises:
            OSError: the file cannot be written.
        """


@contextlib.contextmanager
def embedding_writer(
    out: str | os.PathLike[str], file_format: EmbeddingFormat, settings: Mapping[str, Any]
) -> Iterator[EmbeddingWriter]:
    """Opens a place for embeddings; nothing is written before the first of them.

    Args:
        out: a folder, made if need be, for `pt` and `safetensors`; a file for `h5`.
        file_format: `pt` and `safetensors` write one file a sequence, `h5` one file for all, as biotrainer reads them.
        settings: how the embeddings are made, JSON values; all in a folder must be made the same way.

    Raises:
        ValueError: the folder holds embeddings made with other settings, or the place cannot be written.
        ImportError: h5py is missing.
    """
    out = Path(out)
    check_writable(out if file_format == "h5" else out / INDEX_FILE)
    if file_format == "h5":
        with replacing(out) as temporary:
            h5 = _H5Writer(temporary, settings)
            try:
                yield h5
            finally:
                h5.close()
    else:
        folder = _FolderWriter(out, file_format, settings)
        try:
            yield folder
        finally:
            # Also after an error: what was written shall be found.
            folder.write_index()


def sequence_hash(sequence: str) -> str:
    """The name of a sequence's files and data sets: that of biotrainer, SHA-256 of the sequence and its length."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()


def read_embedding(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Reads a file of the safetensors format: metadata (`label`, `residues`) and tensors by flat name.

    Raises:
        ValueError: the file is missing, damaged or of another kind.
    """
    tensors, metadata = read_artifact(path, "embedding", FORMAT_VERSION)
    return metadata, tensors


class _FolderWriter(EmbeddingWriter):
    def __init__(self, folder: Path, file_format: EmbeddingFormat, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.file_format = file_format
        self.settings = {"format": file_format, **settings}
        self._check_settings()
        self._rows = self._read_index()
        self._written = False

    def write(self, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        if not self._written:
            self._write_settings()
            self._written = True
        name = sequence_hash(record.sequence)
        embedding_file = cache_file = ""
        if embedding.tensors():
            embedding_file = f"{name}.{self.file_format}"
            self._write_embedding(self.folder / embedding_file, record, embedding)
        if embedding.cache is not None:
            cache_file = f"{name}.cache.safetensors"
            embedding.cache.save(self.folder / cache_file)
        self._rows[record.id] = "\t".join([record.id, str(len(record.sequence)), embedding_file, cache_file])

    def write_index(self) -> None:
        if self._written:
            with replacing(self.folder / INDEX_FILE) as temporary:
                temporary.write_text("\n".join([_INDEX_HEADER, *self._rows.values(), ""]), encoding="utf-8")

    def _write_embedding(self, path: Path, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        if self.file_format == "safetensors":
            metadata = {"label": record.id, "residues": len(record.sequence)}
            write_artifact(path, "embedding", FORMAT_VERSION, embedding.tensors(), metadata)
            return
        names = ("representations", "mean_representations", "bos_representations", "contacts")
        asked = {name: getattr(embedding, name) for name in names if getattr(embedding, name) is not None}
        with replacing(path) as temporary:
            torch.save({"label": record.id} | asked, temporary)

    def _check_settings(self) -> None:
        path = self.folder / SETTINGS_FILE
        if not path.exists():
            return
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); give another folder") from error
        differing = [name for name in self.settings | there if self.settings.get(name) != there.get(name)]
        if differing:
            name = differing[0]
            raise ValueError(
                f"{self.folder}: holds embeddings made with {name} {there.get(name)}, not {self.settings.get(name)};"
                " give another folder"
            )

    def _write_settings(self) -> None:
        with replacing(self.folder / SETTINGS_FILE) as temporary:
            temporary.write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        if not path.exists():
            return {}
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or lines[0] != _INDEX_HEADER:
            raise ValueError(f"{path}: is no index of embeddings; give another folder")
        return {line.split("\t", 1)[0]: line for line in lines[1:]}


class _H5Writer(EmbeddingWriter):
    """One data set a sequence where one thing is asked for, as biotrainer has it; else a group of data sets.

    The attribute `original_id` is the protein's identifier; proteins of the same sequence share one entry, whose
    further identifiers stand in `other_ids`.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ImportError("format h5 needs h5py: pip install 'esm-turbo[h5]'") from error
        self.file = h5py.File(path, "w")
        self.file.attrs["settings"] = json.dumps(dict(settings))

    def write(self, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        name = sequence_hash(record.sequence)
        if name in self.file:
            attributes = self.file[name].attrs
            attributes["other_ids"] = [*attributes.get("other_ids", []), record.id]
            return
        tensors = embedding.tensors()
        if len(tensors) == 1:
            [tensor] = tensors.values()
            self.file.create_dataset(name, data=tensor.numpy())
        else:
            for key, tensor in tensors.items():
                self.file.create_dataset(f"{name}/{key.replace('.', '/')}", data=tensor.numpy())
        self.file[name].attrs["original_id"] = record.id

    def close(self) -> None:
        self.file.close()
