"""Embeddings in one file, of a format that is lost if its process dies while writing it.

So a run writes one file per sequence into a hidden folder beside it, from which an interrupted run resumes, and exports
the folder to the one file at its end, with what the file held before.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.writing import LOCK_FILE, remove_temporaries, replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import (
    FolderWriter,
    check_same_settings,
    read_embedding,
    sequence_hash,
)
from esm_turbo.tasks.embedding.index import SameSequence

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

Arrays = dict[str, npt.NDArray[np.float32]]
"""Results of a protein by flat name, such as `mean_representations.12`."""


@dataclass(frozen=True)
class Entry:
    """The embedding of a sequence.

    Attributes:
        arrays: its results.
        key: hash of the sequence and the settings, see `PartFiles.key`; empty if the file has none.
        residues: of the whole sequence; 0 if the file does not say.
    """

    arrays: Arrays
    key: str = ""
    residues: int = 0


class EmbeddingFile(ABC):
    """A file of embeddings, open for reading. Its entries are named by hashes of sequences.

    Attributes:
        settings: of the embeddings.
        unusable: names of damaged entries.

    Raises:
        ArtifactError: (a ValueError) it is damaged.
        ValueError: it holds no embeddings of this package.
        ImportError: the package that reads it is missing.
    """

    in_order: ClassVar[bool]
    """Whether entries are in the order of the proteins."""

    settings: dict[str, Any]

    @abstractmethod
    def __init__(self, path: Path) -> None: ...

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
        """Close the file."""

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
        self.out = out
        self._kind = kind
        self._old: EmbeddingFile | None = None
        self._entries: dict[str, str] = {}
        self._unusable: set[str] = set()
        self._changed = False
        remove_temporaries(out.parent, out.name)
        if out.exists():
            self._open()
        for identifier, _, file, _ in self.index.rows:
            self._assign(identifier, file.removesuffix(".safetensors"))

    def _open(self) -> None:
        try:
            self._old = self._kind(self.out)
            check_same_settings(self.out, self._old.settings, self._content)
            self._entries |= self._old.names()
        except ArtifactError:
            # It is written again.
            self.close()
            self._old = None
            self.damaged.append(os.fspath(self.out))
            self._changed = True
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Close the existing file."""
        if self._old is not None:
            self._old.close()

    def has(self, proteins: SameSequence) -> bool:
        sequence = proteins[0].sequence
        name = sequence_hash(sequence)
        held = self._old and self._old.holds(name, self.parts.key(sequence))
        if held is False and name not in self._unusable:
            self._unusable.add(name)
            self.damaged.append(f"{self.out}, entry {name}")
        if not held and not super().has(proteins):
            return False
        for record in proteins:
            self._assign(record.id, name)
        return True

    def add(self, proteins: SameSequence) -> None:
        super().add(proteins)
        for record in proteins:
            self._assign(record.id, sequence_hash(record.sequence))

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        self.commit()
        if self._kind.in_order:
            # As in an index, so that the order does not depend on interruptions.
            moved = {record.id: self._entries[record.id] for record in records if record.id in self._entries}
            ordered = {one: name for one, name in self._entries.items() if one not in moved} | moved
            self._changed |= list(ordered) != list(self._entries)
            self._entries = ordered
        if self._changed or self._unusable:
            with replacing(self.out) as temporary:
                self._kind.write(temporary, self._content | self.recorded, self._entries, self._read)
        # The lock stays for its owner to remove, who still holds it, and so does the temporary of the parts.
        for path in self.folder.iterdir():
            if path.name != LOCK_FILE and path != self.parts.folder:
                path.unlink()

    def _read(self, name: str) -> Entry | None:
        """An entry of the existing file or of the parts; None for a damaged one that could not be computed again."""
        part = self.folder / f"{name}.safetensors"
        if self._old is not None and name not in self._unusable:
            try:
                return self._old.read(name)
            except KeyError:
                pass
        if not part.exists():
            return None
        metadata, tensors = read_embedding(part)
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        return Entry(arrays, metadata["key"], metadata["residues"])

    def _assign(self, identifier: str, name: str) -> None:
        # An identifier whose sequence has changed moves to another entry.
        self._changed |= self._entries.get(identifier) != name
        self._entries[identifier] = name
