"""Embeddings on disk: a folder of `.pt` or safetensors files with an index.

Files are named by a hash of the sequence, never by an identifier, which may hold anything. Every file is whole or
absent, and is checked before it is taken for done. A folder holds the embeddings of one model and one choice of
options, kept in `settings.json`, and is written by one process at a time.

A batch counts as done when its rows stand in `index.tsv`, to which they are added after its files. What a killed run
leaves is therefore whole batches, and the run that goes on where it stopped computes the same batches as one that was
never stopped.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.writing import file_errors, remove_temporaries, replacing
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.embed import ProteinEmbedding

FORMAT_VERSION = 1
INDEX_FILE = "index.tsv"
SETTINGS_FILE = "settings.json"
_INDEX_HEADER = "id\tresidues\tembedding\tcache"
_COLUMNS = 4
_ASKED = ("representations", "mean_representations", "bos_representations", "contacts")

SameSequence = Sequence[ProteinRecord]
"""Proteins of one sequence, at least one: they share one embedding."""


class EmbeddingWriter(ABC):
    """Writes the embeddings of proteins.

    Attributes:
        damaged: names of what was found there and cannot be used: it is to be made anew.
    """

    def __init__(self) -> None:
        self.damaged: list[str] = []

    @abstractmethod
    def has(self, proteins: SameSequence) -> bool:
        """Whether these are done, from an earlier run; reads and checks the whole of their embedding."""

    @abstractmethod
    def write(self, proteins: SameSequence, embedding: ProteinEmbedding) -> None:
        """Writes an embedding; it counts after the next `commit`.

        Raises:
            OSError: the file cannot be written. What was there before is unharmed.
        """

    @abstractmethod
    def commit(self) -> None:
        """Makes what was written since the last call count, also if the process is killed afterwards.

        Raises:
            OSError: as of `write`.
        """

    @abstractmethod
    def finish(self, records: Sequence[ProteinRecord]) -> None:
        """To be called at the end of a run that was not interrupted.

        Args:
            records: all of the run's.

        Raises:
            OSError: as of `write`.
        """


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


def is_embeddings(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder of embeddings."""
    return all((Path(path) / name).is_file() for name in (INDEX_FILE, SETTINGS_FILE))


def embeddings_info(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """How the embeddings of a folder were made, and of how many proteins they are.

    Raises:
        ValueError: the settings are damaged.
    """
    proteins = sum(1 for _ in _Index(Path(folder) / INDEX_FILE).rows)
    return {"kind": "embeddings", "proteins": proteins, **_read_settings(Path(folder))}


def check_same_settings(place: object, there: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Makes sure that embeddings were made as new ones will be.

    Raises:
        ValueError: they were not; names the first difference.
    """
    for name in dict.fromkeys([*settings, *there]):
        if settings.get(name) != there.get(name):
            raise ValueError(
                f"{place}: holds embeddings made with {name} {there.get(name)}, not {settings.get(name)};"
                " give another place, or the same options"
            )


class FolderWriter(EmbeddingWriter):
    """One file a sequence, and one for its cache.

    Args:
        folder: which the caller has for itself alone.
        file_format: of the files.
        settings: see `embedding_run.embedding_writer`.

    Raises:
        ValueError: the folder holds embeddings made with other settings, or files that are none of embeddings.
    """

    def __init__(self, folder: Path, file_format: EmbeddingFormat, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder = folder
        self.file_format = file_format
        self.settings = {"format": file_format, **settings}
        self._known_settings = self._check_settings()
        self.index = _Index(folder / INDEX_FILE)
        if self.index.damaged and not self._known_settings:
            raise ValueError(f"{self.index.path}: is no index of embeddings; give another folder")
        if self.index.damaged:
            self.damaged.append(os.fspath(self.index.path))
        include = set(settings["include"])
        self._suffixes = (
            f".{file_format}" if include - {"cache"} else "",
            ".cache.safetensors" if "cache" in include else "",
        )
        remove_temporaries(folder)

    def has(self, proteins: SameSequence) -> bool:
        names = self.names(proteins[0].sequence)
        if not self.index.holds(names) or not all(self._is_good(name) for name in names if name):
            return False
        # Others of the same sequence may be new.
        self.index.stage(proteins, names)
        return True

    def write(self, proteins: SameSequence, embedding: ProteinEmbedding) -> None:
        self._write_settings()
        record, names = proteins[0], self.names(proteins[0].sequence)
        if names[0]:
            self._write_embedding(self.folder / names[0], record, embedding)
        if names[1]:
            assert embedding.cache is not None
            with file_errors(self.folder / names[1]):
                embedding.cache.save(self.folder / names[1])
        self.index.stage(proteins, names)

    def commit(self) -> None:
        with file_errors(self.index.path):
            self.index.commit()

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        self.commit()
        with file_errors(self.index.path):
            self.index.sort([record.id for record in records])

    def names(self, sequence: str) -> tuple[str, str]:
        """The files of a sequence's embedding and of its cache, empty for one that is not asked for."""
        name = sequence_hash(sequence)
        embedding, cache = (f"{name}{suffix}" if suffix else "" for suffix in self._suffixes)
        return embedding, cache

    def _write_embedding(self, path: Path, record: ProteinRecord, embedding: ProteinEmbedding) -> None:
        with file_errors(path):
            if self.file_format == "safetensors":
                metadata = {"label": record.id, "residues": len(record.sequence)}
                write_artifact(path, "embedding", FORMAT_VERSION, embedding.tensors(), metadata)
                return
            asked = {name: getattr(embedding, name) for name in _ASKED if getattr(embedding, name) is not None}
            # In memory first: torch writes a file's own name into it, and reports a full disk as an internal error.
            buffer = io.BytesIO()
            torch.save({"label": record.id} | asked, buffer)
            with replacing(path) as temporary:
                temporary.write_bytes(buffer.getbuffer())

    def _is_good(self, name: str) -> bool:
        path = self.folder / name
        if not path.exists():
            return False
        try:
            if name.endswith(".cache.safetensors"):
                TurboKVCache.load(path)
            elif self.file_format == "safetensors":
                read_embedding(path)
            else:
                _check_pt(path)
        except ArtifactError:
            self.damaged.append(os.fspath(path))
            return False
        return True

    def _check_settings(self) -> bool:
        """Whether the folder has settings, which then are the same."""
        if not (self.folder / SETTINGS_FILE).exists():
            return False
        check_same_settings(self.folder, _read_settings(self.folder), self.settings)
        return True

    def _write_settings(self) -> None:
        if not self._known_settings:
            path = self.folder / SETTINGS_FILE
            with file_errors(path), replacing(path) as temporary:
                temporary.write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")
            self._known_settings = True


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("no settings")
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); give another folder") from error
    return settings


class _Index:
    """`index.tsv`: which identifier has which files; rows are added at its end.

    Attributes:
        damaged: whether lines of it could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = False
        self._rows: dict[str, str] = {}
        self._staged: dict[str, str] = {}
        self._files: set[str] = set()
        content = path.read_bytes() if path.exists() else b""
        # What follows the last line break was being written when its process died.
        self._whole_bytes = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self._whole_bytes].splitlines()):
            try:
                row = line.decode()
            except UnicodeDecodeError:
                row = ""
            cells = row.split("\t")
            if row == _INDEX_HEADER:
                continue
            if number == 0 or len(cells) != _COLUMNS:
                self.damaged = True
                continue
            self._rows[cells[0]] = row
            self._files |= set(cells[2:])

    @property
    def rows(self) -> Iterator[list[str]]:
        """Identifier, residues, and the files of the embedding and the cache."""
        return (row.split("\t") for row in self._rows.values())

    def holds(self, files: Sequence[str]) -> bool:
        """Whether all these files are those of some protein."""
        return self._files.issuperset(files)

    def stage(self, proteins: SameSequence, files: Sequence[str]) -> None:
        """Rows for the next `commit`; those that are there already are left out."""
        for record in proteins:
            row = "\t".join([record.id, str(len(record.sequence)), *files])
            if self._rows.get(record.id) != row:
                self._staged[record.id] = row

    def commit(self) -> None:
        if not self._staged:
            return
        rows = list(self._staged.values())
        if not self._whole_bytes:
            rows.insert(0, _INDEX_HEADER)
        self._whole_bytes = _append(self.path, self._whole_bytes, ("\n".join(rows) + "\n").encode())
        self._rows |= self._staged
        self._files |= {name for row in self._staged.values() for name in row.split("\t")[2:]}
        self._staged = {}

    def sort(self, last: Sequence[str]) -> None:
        """Puts the rows into an order that does not tell how often a run was interrupted: these at the end."""
        moved = dict.fromkeys(name for name in last if name in self._rows)
        rows = {name: row for name, row in self._rows.items() if name not in moved}
        rows |= {name: self._rows[name] for name in moved}
        text = "\n".join([_INDEX_HEADER, *rows.values(), ""]).encode()
        if rows and (not self.path.exists() or text != self.path.read_bytes()):
            with replacing(self.path) as temporary:
                temporary.write_bytes(text)
        self._rows, self._whole_bytes = rows, len(text)


def _append(path: Path, size: int, content: bytes) -> int:
    """Writes after the first `size` bytes of a file, whatever follows them, and returns the new size."""
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        file.truncate(size)
        file.seek(size)
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Rows of half a batch would let the rest of it be batched anew.
            file.truncate(size)
            raise
        return size + len(content)


def _check_pt(path: Path) -> None:
    """Checks a file of torch.save: that it loads, and the checksums of its parts, which torch does not look at.

    Raises:
        ArtifactError: it is damaged or cut short.
    """
    try:
        buffer = io.BytesIO(path.read_bytes())
        with zipfile.ZipFile(buffer) as file:
            bad = file.testzip()
            # torch reads whatever lies in memory for a part that is marked as a folder; it marks none itself.
            bad = bad or next((part.filename for part in file.infolist() if part.external_attr), None)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    # A damaged header can make them stumble over almost anything.
    except Exception as error:
        raise ArtifactError(f"{path}: damaged ({error})") from error
    if bad is not None:
        raise ArtifactError(f"{path}: damaged ({bad} is not what was written)")
