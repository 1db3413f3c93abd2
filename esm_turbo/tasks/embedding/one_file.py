"""Embeddings in one file, of a format that is lost if its process dies while writing it.

So a run writes one file per sequence into a hidden folder beside it, from which an interrupted run resumes, and exports
the folder to the one file at its end, with what the file held before.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.writing import LOCK_FILE, remove_temporaries, replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import Entry, SameSequence, check_same_settings, read_entry, sequence_hash
from esm_turbo.tasks.embedding.folder import FolderWriter
from esm_turbo.tasks.embedding.index import moved_last

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class EmbeddingFile(ABC):
    """A file of embeddings, for reading. Its entries are named by hashes of sequences.

    Args:
        path: of the file.
        joined: number of files that are read by turns, which share what is held in memory.

    Attributes:
        settings: of the embeddings.

    Raises:
        ArtifactError: (a ValueError) it is damaged.
        ValueError: it holds no embeddings of this package.
        ImportError: the package that reads it is missing.
    """

    in_order: ClassVar[bool]
    """Whether entries are in the order of the proteins."""

    path: Path
    settings: dict[str, Any]

    @abstractmethod
    def __init__(self, path: Path, joined: int = 1) -> None: ...

    @abstractmethod
    def names(self) -> dict[str, str]:
        """The entry of each identifier, in the order of the file.

        Raises:
            ArtifactError: (a ValueError) the file is damaged.
        """

    @abstractmethod
    def holds(self, name: str, key: str) -> bool | None:
        """Whether there is an undamaged entry of this name and key; None if there is none of this name."""

    @abstractmethod
    def read(self, name: str) -> Entry:
        """An entry.

        Raises:
            KeyError: there is none of this name.
        """

    def close(self) -> None:  # noqa: B027 - not every format keeps it open
        """Close the file until it is read again."""

    @staticmethod
    @abstractmethod
    def check(out: Path, include: Sequence[str]) -> None:
        """Check, before any work is done, that the format holds these results and no other file is overwritten.

        Raises:
            ValueError: it does not, or the path is a file of another kind.
            ImportError: the package that writes it is missing.
        """

    @staticmethod
    @abstractmethod
    def write(
        path: Path, settings: Mapping[str, Any], names: Mapping[str, str], read: Callable[[str], Entry | None]
    ) -> None:
        """Write a file.

        Args:
            path: of the file.
            settings: of the embeddings.
            names: the entry of each identifier, in the order of the file.
            read: returns an entry by name; None for one that is left out.
        """


class OneFileWriter(FolderWriter):
    """Writes one file for all sequences, over a folder of its parts.

    Args:
        kind: class of the file.
        out: the file; its entries are kept.
        parts: see `FolderWriter`, as are `settings`, `turbo` and `devices`.

    Raises:
        ValueError: the file or its parts hold embeddings made with other settings, or it is not one of embeddings.
    """

    def __init__(
        self,
        kind: type[EmbeddingFile],
        out: Path,
        parts: Path,
        settings: Mapping[str, Any],
        turbo: ContextModel,
        devices: str | None = None,
    ) -> None:
        super().__init__(parts, "safetensors", settings, turbo, devices=devices)
        self._out, self._kind = out, kind
        self._old: EmbeddingFile | None = None
        self._old_names: dict[str, str] = {}
        # Entries of the existing file that are damaged; with None, all of it.
        self._damaged: set[str | None] = set()
        remove_temporaries(out.parent, out.name)
        if out.exists():
            try:
                self._old = kind(out)
                check_same_settings(out, self._old.settings, settings)
                self._old_names = self._old.names()
            except ArtifactError:
                # It is written again.
                self.close()
                self._old = None
                self._note_damage(None, os.fspath(out))
            except ValueError:
                self.close()
                raise

    def close(self) -> None:
        """Close the existing file."""
        if self._old is not None:
            self._old.close()

    def has(self, proteins: SameSequence) -> bool:
        name = sequence_hash(proteins[0].sequence)
        held = self._old and self._old.holds(name, self.parts.key(proteins[0].sequence))
        if held is False:
            self._note_damage(name, f"{self._out}, entry {name}")
        return bool(held) or super().has(proteins)

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        self.commit()
        # An identifier whose sequence has changed moves to another entry.
        names = self._old_names | {identifier: Path(file).stem for identifier, _, file, _ in self.index.rows}
        names |= {record.id: sequence_hash(record.sequence) for record in records}
        if self._kind.in_order:
            # As in an index, so that the order does not depend on interruptions.
            names = moved_last(names, [record.id for record in records])
        if self._damaged or list(names.items()) != list(self._old_names.items()):
            with replacing(self._out) as temporary:
                self._kind.write(temporary, self._content | self.recorded, names, self._read)
        # The lock stays for its owner to remove, who still holds it, and so does the temporary of the parts.
        for path in self.folder.iterdir():
            if path.name != LOCK_FILE and path != self.parts.folder:
                path.unlink()

    def _read(self, name: str) -> Entry | None:
        """An entry of the existing file or of the parts; None for a damaged one that could not be computed again."""
        if self._old is not None and name not in self._damaged:
            with contextlib.suppress(KeyError):
                return self._old.read(name)
        part = self.folder / f"{name}.safetensors"
        return read_entry(part) if part.exists() else None

    def _note_damage(self, entry: str | None, what: str) -> None:
        if entry not in self._damaged:
            self._damaged.add(entry)
            self.damaged.append(what)
