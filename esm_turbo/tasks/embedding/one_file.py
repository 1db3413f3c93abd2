"""Embeddings in one file, which are exported from a folder when it is complete.

A run writes one file per sequence into a hidden folder beside the file, from which an interrupted run resumes. Proteins
are added to folders alone: a file that exists is complete, or damaged and written again, or refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.writing import LOCK_FILE, remove_temporaries, replacing
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding import h5, parquet
from esm_turbo.tasks.embedding.files import (
    Row,
    SameSequence,
    check_same_settings,
    read_entry,
    sequence_hash,
)
from esm_turbo.tasks.embedding.folder import FolderWriter, joined_rows

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class OneFileFormat(Protocol):
    """A module that reads and writes such files, whose entries are named by hashes of sequences.

    All functions raise an ImportError if the package that they need is missing, and those that read an ArtifactError
    (a ValueError) for a damaged file.
    """

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

    def names(self, path: Path) -> dict[str, str]:
        """The entry of each identifier, as they follow each other; the whole file is read and checked."""

    def write(self, path: Path, settings: Mapping[str, Any], rows: Iterable[Row]) -> None:
        """Write a file.

        Raises:
            OSError: it could not be written.
        """


ONE_FILE_FORMATS: dict[EmbeddingFormat, OneFileFormat] = {"h5": h5, "parquet": parquet}
"""Formats of embeddings that are one file."""


class OneFileWriter(FolderWriter):
    """Writes one file for all sequences, over a folder of its parts.

    Args:
        kind: format of the file.
        out: the file.
        records: all proteins that it is to hold.
        parts: see `FolderWriter`, as are `settings`, `turbo` and `devices`.

    Raises:
        ValueError: the file or its parts hold embeddings made with other settings, the file lacks one of the proteins,
            is a table of others or in another order, or not one of embeddings.
    """

    def __init__(
        self,
        kind: OneFileFormat,
        out: Path,
        records: Sequence[ProteinRecord],
        parts: Path,
        settings: Mapping[str, Any],
        turbo: ContextModel,
        devices: str | None = None,
    ) -> None:
        super().__init__(parts, "safetensors", settings, turbo, devices=devices)
        self._kind, self._out = kind, out
        remove_temporaries(out.parent, out.name)
        names = {record.id: sequence_hash(record.sequence) for record in records}
        try:
            self._is_complete = _holds(kind, out, settings, names)
        except ArtifactError:
            self._is_complete = False
            self.damaged.append(os.fspath(out))

    def has(self, proteins: SameSequence) -> bool:
        return self._is_complete or super().has(proteins)

    def finish(self, identifiers: Sequence[str]) -> None:
        super().finish(identifiers)
        if not self._is_complete:
            chosen = set(identifiers)
            rows = ((self.folder, row) for row in self.index.rows if row[0] in chosen)
            _export(self._kind, self._out, self._content | self.recorded, rows)
        # The lock stays for its owner to remove, who still holds it, and so does the temporary of the parts.
        for path in self.folder.iterdir():
            if path.name != LOCK_FILE and path != self.parts.folder:
                path.unlink()


def merge_files(
    file_format: EmbeddingFormat, out: Path, folders: Sequence[Path], orders: Sequence[Sequence[int]]
) -> None:
    """Join folders of embeddings, whose files are named by hashes, into one file.

    Args:
        file_format: `h5` or `parquet`.
        out: the file to write; it may exist if it holds all of the proteins, or is damaged.
        folders: of the embeddings.
        orders: see `folder.merge_folders`.

    Raises:
        ValueError: the settings differ, or `out` exists and lacks a protein, is a table of others or in another order,
            or a file of another kind.
        ImportError: h5py or pyarrow is missing.
        OSError: the file cannot be written.
    """
    kind = ONE_FILE_FORMATS[file_format]
    settings, rows = joined_rows(folders, orders)
    del settings["format"]
    kind.check(out, settings["include"])
    try:
        is_complete = _holds(kind, out, settings, {identifier: Path(file).stem for _, (identifier, _, file, _) in rows})
    except ArtifactError:
        is_complete = False
    if not is_complete:
        _export(kind, out, settings, rows)


def _holds(kind: OneFileFormat, out: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """True if a file holds all proteins, by identifier and hash of the sequence; False if there is none.

    Raises:
        ArtifactError: it is damaged.
        ValueError: it lacks a protein, was made with other settings, or is a table of other rows than the input's.
    """
    if not out.exists():
        return False
    check_same_settings(out, kind.settings(out), settings)
    held = kind.names(out)
    missing = names.items() - held.items()
    if missing:
        raise ValueError(
            f"{out}: exists, and lacks {len(missing):,} of the proteins; they can be added to a folder, but not to one"
            " file: give another file, or a folder"
        )
    if kind is parquet and list(held) != list(names):
        raise ValueError(f"{out}: exists, with more proteins or in another order than the input: give another file")
    return True


def _export(
    kind: OneFileFormat, out: Path, settings: Mapping[str, Any], rows: Iterable[tuple[Path, Sequence[str]]]
) -> None:
    """Write embeddings into one file, atomically, from rows of an index and the folders that they are of."""
    entries = (
        Row(identifier, Path(file).stem, int(residues), read_entry(folder / file)[0])
        for folder, (identifier, residues, file, _) in rows
    )
    with replacing(out) as temporary:
        kind.write(temporary, settings, entries)
