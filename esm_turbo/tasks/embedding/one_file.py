"""Embeddings in one file, of a format that is lost if its process dies while writing it.

So a run writes one file per sequence into a hidden folder beside it, from which an interrupted run resumes, and exports
the folder to the one file at its end, with what the file held before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.writing import LOCK_FILE, file_errors, remove_temporaries, replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import (
    Arrays,
    Entry,
    SameSequence,
    check_same_settings,
    read_entry,
    sequence_hash,
    write_embedding,
)
from esm_turbo.tasks.embedding.folder import FolderWriter
from esm_turbo.tasks.embedding.index import moved_last

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class OneFileFormat(Protocol):
    """A module that reads and writes such files. Entries are named by hashes of sequences.

    All functions raise an ImportError if the package that they need is missing, and those that read an ArtifactError
    (a ValueError) for a damaged file.
    """

    @property
    def in_order(self) -> bool:
        """Whether entries are in the order of the proteins."""

    def check(self, out: Path, include: Sequence[str]) -> None:
        """Check, before any work is done, that the format holds these results and no other file is overwritten.

        Raises:
            ValueError: it does not, or the path is a file of another kind.
        """

    def settings(self, path: Path) -> dict[str, Any]:
        """The settings of the embeddings in a file.

        Raises:
            ValueError: it holds no embeddings of this package.
        """

    def read(self, path: Path, joined: int = 1) -> Iterator[tuple[list[str], Entry]]:
        """Yield the entries of a file with their identifiers; an entry may come again with other identifiers.

        Args:
            path: of the file.
            joined: number of files that are read by turns, which share what is held in memory.
        """

    def find(self, path: Path, names: Sequence[str]) -> Iterator[Arrays]:
        """Yield the results of entries in the order of their names."""

    def write(self, path: Path, settings: Mapping[str, Any], entries: Iterable[tuple[list[str], Entry]]) -> None:
        """Write a file of entries with their identifiers.

        Raises:
            OSError: it could not be written.
        """


class OneFileWriter(FolderWriter):
    """Writes one file for all sequences, over a folder of its parts.

    Args:
        kind: format of the file.
        out: the file; its entries are kept.
        parts: see `FolderWriter`, as are `settings`, `turbo` and `devices`.

    Raises:
        ValueError: the file or its parts hold embeddings made with other settings, or it is not one of embeddings.
    """

    def __init__(
        self,
        kind: OneFileFormat,
        out: Path,
        parts: Path,
        settings: Mapping[str, Any],
        turbo: ContextModel,
        devices: str | None = None,
    ) -> None:
        super().__init__(parts, "safetensors", settings, turbo, devices=devices)
        self._kind, self._out = kind, out
        # Of the existing file: the entry of each identifier, and the key of each entry; None if the format has none.
        self._old: dict[str, str] = {}
        self._keys: dict[str, str | None] = {}
        remove_temporaries(out.parent, out.name)
        if not out.exists():
            return
        try:
            check_same_settings(out, kind.settings(out), settings)
            for identifiers, entry in kind.read(out):
                self._old |= dict.fromkeys(identifiers, entry.name)
                self._keys[entry.name] = entry.key
        except ArtifactError:
            # It is written again.
            self._old, self._keys = {}, {}
            self.damaged.append(os.fspath(out))

    def has(self, proteins: SameSequence) -> bool:
        name = sequence_hash(proteins[0].sequence)
        if self._keys.get(name, "") in (None, self.parts.key(proteins[0].sequence)):
            return True
        if self._keys.pop(name, None) is not None:
            self.damaged.append(f"{self._out}, entry {name}")
        return super().has(proteins)

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        self.commit()
        # An identifier whose sequence has changed moves to another entry.
        names = self._old | {identifier: Path(file).stem for identifier, _, file, _ in self.index.rows}
        names |= {record.id: sequence_hash(record.sequence) for record in records}
        if self._kind.in_order:
            # As in an index, so that the order does not depend on interruptions.
            names = moved_last(names, [record.id for record in records])
        if self.damaged or list(names.items()) != list(self._old.items()):
            if self._keys:
                self._import()
            with replacing(self._out) as temporary:
                found = ((identifier, self._part(name)) for identifier, name in names.items())
                # A damaged entry that could not be computed again is left out.
                entries = (([identifier], read_entry(part)) for identifier, part in found if part.exists())
                self._kind.write(temporary, self._content | self.recorded, entries)
        # The lock stays for its owner to remove, who still holds it, and so does the temporary of the parts.
        for path in self.folder.iterdir():
            if path.name != LOCK_FILE and path != self.parts.folder:
                path.unlink()

    def _import(self) -> None:
        """Write the entries of the existing file as parts, too."""
        for identifiers, entry in self._kind.read(self._out):
            part = self._part(entry.name)
            if entry.arrays and entry.name in self._keys and not part.exists():
                metadata = {"label": identifiers[0], "key": entry.key or "", "residues": entry.residues}
                tensors = {name: torch.from_numpy(array) for name, array in entry.arrays.items()}
                with file_errors(part):
                    temporary = self.parts.folder / part.name
                    write_embedding(temporary, tensors, metadata)
                    os.replace(temporary, part)

    def _part(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
