"""Embeddings in one file, of a format that is lost if its process dies while writing it.

So a run writes one file per sequence into a hidden folder beside it, from which an interrupted run resumes, and
assembles the one file at its end.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.files.writing import LOCK_FILE, remove_temporaries, replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import FolderWriter, SameSequence, sequence_hash

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


def parts_folder(out: Path) -> Path:
    """Folder of the embeddings of an unfinished file."""
    return out.parent / f".{out.name}.parts"


class OneFileWriter(FolderWriter):
    """Writes one file for all sequences, over a folder of its parts. Its entries are named by hashes of sequences.

    Args:
        out: the file; its entries are kept.
        parts: see `FolderWriter`.
        settings: see `records.embedding_writer`.
        turbo: the model.
        devices: see `FolderWriter`.

    Raises:
        ValueError: the file or its parts hold embeddings made with other settings, or it is not one of embeddings.
    """

    def __init__(
        self, out: Path, parts: Path, settings: Mapping[str, Any], turbo: ContextModel, devices: str | None = None
    ) -> None:
        super().__init__(parts_folder(out), parts, "safetensors", settings, turbo, devices=devices)
        self.out = out
        self._entry_of: dict[str, str] = {}
        self._unusable: set[str] = set()
        self._changed = False
        remove_temporaries(out.parent, out.name)
        self._read_existing()
        for identifier, _, file, _ in self.index.rows:
            self._assign(identifier, file.removesuffix(".safetensors"))

    def close(self) -> None:
        """Close the existing file."""

    def has(self, proteins: SameSequence) -> bool:
        sequence = proteins[0].sequence
        name = sequence_hash(sequence)
        if not self._holds(name, self.parts.key(sequence)) and not super().has(proteins):
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
        if self._changed or self._unusable:
            with replacing(self.out) as temporary:
                self._assemble(temporary)
        # The lock stays for its owner to remove, who still holds it, and so does the temporary of the parts.
        for path in self.folder.iterdir():
            if path.name != LOCK_FILE and path != self.parts.folder:
                path.unlink()

    @abstractmethod
    def _read_existing(self) -> None:
        """Open the existing file, if there is one, and assign its identifiers to its entries.

        Raises:
            ValueError: it holds embeddings made with other settings, or none.
        """

    @abstractmethod
    def _holds(self, name: str, key: str) -> bool:
        """Whether the existing file has an undamaged entry of this name and key."""

    @abstractmethod
    def _assemble(self, path: Path) -> None:
        """Write a new file of the entries of the existing one and of the parts."""

    def _assign(self, identifier: str, name: str) -> None:
        # An identifier whose sequence has changed moves to another entry.
        self._changed |= self._entry_of.get(identifier) != name
        self._entry_of[identifier] = name

    def _set_damaged(self) -> None:
        """The existing file cannot be read: it is written again."""
        self.damaged.append(os.fspath(self.out))
        self._changed = True
