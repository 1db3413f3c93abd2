"""A folder of embeddings: `.pt` or safetensors files with an index.

Files are named by an identifier, where that is a safe name, and else by a hash of the sequence. A file is written
atomically, and checked before a later run reuses it. A folder holds the embeddings of one model with one set of
options, recorded in `settings.json`, and one process writes to it at a time.

A batch is done when its rows are in `index.tsv`, to which they are appended after its files are written. A killed run
therefore leaves whole batches, and a run that resumes it computes the same batches as an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.kinds import INDEX_FILE, SETTINGS_FILE
from esm_turbo.files.writing import file_errors, link_file, only_writer, refuse_links, remove_temporaries, replacing
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.lookup import listed
from esm_turbo.tasks.common.options import EmbeddingFormat, FileNames
from esm_turbo.tasks.embedding.files import (
    CACHE_SUFFIX,
    PartFiles,
    SameSequence,
    check_same_settings,
    is_hashed,
    read_entry,
    read_settings,
    sequence_hash,
)
from esm_turbo.tasks.embedding.index import EmbeddingIndex

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

_log = logging.getLogger("esm_turbo")


class FolderWriter:
    """A folder with one file per sequence, and one for its cache: what it holds, and what is added.

    Args:
        parts: a temporary folder in the folder, which no other process writes to, for the parts of this run.
        file_format: format of the files.
        settings: see `records.embedding_writer`.
        turbo: the model, which existing caches must belong to.
        labels: see `safe_labels`; files of other sequences are named by their hash, as are all if this is None.
        names: whether labels are used; None does as the folder does, and uses them in a new one.
        devices: what computes the embeddings; None for the model's own device.

    Attributes:
        damaged: names of existing files or entries that cannot be used and must be computed again.
        recorded: what is recorded beside the settings, and may differ between runs.
        parts: writes the parts.

    Raises:
        ValueError: the folder holds embeddings made with other settings, or an index that is not one of embeddings.
        OSError: by all methods that write, if a file cannot be written. An earlier version of it stays as it was.
    """

    def __init__(
        self,
        parts: Path,
        file_format: EmbeddingFormat,
        settings: Mapping[str, Any],
        turbo: ContextModel,
        labels: Mapping[str, Sequence[str]] | None = None,
        names: FileNames | None = None,
        devices: str | None = None,
    ) -> None:
        self.damaged: list[str] = []
        self.folder, self.turbo = parts.parent, turbo
        for own in (INDEX_FILE, SETTINGS_FILE):
            refuse_links(self.folder / own, self.folder)
        self.recorded = {"device": devices or str(turbo.model.device)}
        self._content = dict(settings)
        self._settings = {"format": file_format, **settings}
        self._is_new = not (self.folder / SETTINGS_FILE).exists()
        existing = {"names": "label"} if self._is_new else read_settings(self.folder)
        if labels is None or (names or existing.get("names")) != "label":
            labels = {}
        else:
            self._settings["names"] = "label"
        if not self._is_new:
            check_same_settings(self.folder, existing, self._settings)
        self.parts = PartFiles(parts, file_format, settings["include"], self._content)
        # safetensors makes files that nobody else can read.
        (parts / "mode").touch()
        self._mode = (parts / "mode").stat().st_mode
        self.index = EmbeddingIndex(self.folder / INDEX_FILE)
        if self.index.damaged and self._is_new:
            raise ValueError(f"{self.index.path}: is not an index of embeddings; give another folder")
        files = (name for _, _, *own in self.index.rows for name in own if name)
        if "names" not in self._settings and any(not is_hashed(name) for name in files):
            raise ValueError(
                f"{self.folder / SETTINGS_FILE}: damaged (`names` is missing, but {INDEX_FILE} names files by labels);"
                " give another folder"
            )
        if self.index.damaged:
            self.damaged.append(os.fspath(self.index.path))
        self._labels: dict[str, str] = {}
        self._labels |= {sequence: own[0] for sequence, own in labels.items() if self._is_free(sequence, own)}
        remove_temporaries(self.folder)

    def _exists(self, name: str) -> bool:
        return any((self.folder / f"{name}{suffix}").exists() for suffix in self.parts.suffixes)

    def _is_free(self, sequence: str, identifiers: Sequence[str]) -> bool:
        """Whether files may be named by the first of these identifiers: no others' are, and none has a hash yet."""
        files = [f"{identifiers[0]}{suffix}" for suffix in self.parts.suffixes]
        if self._is_new and self._exists(identifiers[0]):
            # Another program's, in a folder that is new to this one.
            return False
        named = any(set(identifiers) & self.index.identifiers(name) for name in self._files(sequence).values())
        return not named and all(self.index.identifiers(name) <= set(identifiers) for name in files)

    def has(self, proteins: SameSequence) -> bool:
        """Whether an earlier run has embedded these proteins; reads and checks their whole embedding."""
        sequence = proteins[0].sequence
        names = self._files(sequence).values()
        if not all(self.index.identifiers(name) and self._is_good(name, sequence) for name in names):
            return False
        # Other proteins with this sequence may be new.
        self._record(proteins)
        return True

    def begin(self) -> None:
        """Record the settings, before the first part."""
        if self._is_new:
            with replacing(self.folder / SETTINGS_FILE, inside=True) as temporary:
                temporary.write_text(json.dumps(self._settings | self.recorded, indent=2) + "\n", encoding="utf-8")
        self._is_new = False

    def add(self, proteins: SameSequence) -> None:
        """Add proteins whose parts have been written; they count as done after the next `commit`."""
        sequence = proteins[0].sequence
        for suffix, name in self._files(sequence).items():
            part = self.parts.path(sequence, suffix)
            with file_errors(self.folder / name):
                os.chmod(part, self._mode)
                os.replace(part, self.folder / name)
        self._record(proteins)

    def commit(self) -> None:
        """Make everything added since the last call count as done, even if the process is killed afterwards."""
        with file_errors(self.index.path):
            self.index.commit()

    def finish(self, records: Sequence[ProteinRecord]) -> None:
        """Complete the output, at the end of a run that was not interrupted and has embedded these records."""
        self.commit()
        with file_errors(self.index.path):
            self.index.sort([record.id for record in records])
        if "names" not in self._settings:
            return
        there, own = set(os.listdir(self.folder)), {identifier: files for identifier, _, *files in self.index.rows}
        names = ((record.id, f"{record.id}{suffix}") for record in records for suffix in self.parts.suffixes)
        if left := [identifier for identifier, name in names if name in there and name not in own[identifier]]:
            _log.warning(
                "%s: its files named %s are of other sequences, or of another program; %s names those of these",
                self.folder,
                listed(list(dict.fromkeys(left))),
                INDEX_FILE,
            )

    def _files(self, sequence: str) -> dict[str, str]:
        """Names of the files of a sequence, by suffix."""
        name = self._labels.get(sequence) or sequence_hash(sequence)
        return {suffix: f"{name}{suffix}" for suffix in self.parts.suffixes}

    def _record(self, proteins: SameSequence) -> None:
        files = self._files(proteins[0].sequence)
        cache = files.pop(CACHE_SUFFIX, "")
        for record in proteins:
            self.index.add(record.id, len(record.sequence), ["".join(files.values()), cache])

    def _is_good(self, name: str, sequence: str) -> bool:
        """Whether a file is undamaged and holds this sequence's results under these settings."""
        path = self.folder / name
        if not path.exists():
            return False
        try:
            if path.is_symlink():
                raise ArtifactError(f"{path}: is a symbolic link, which is not followed here")
            if name.endswith(CACHE_SUFFIX):
                is_good = self._holds_context(path, sequence)
            else:
                is_good = read_entry(path)[1] == self.parts.key(sequence)
        # A cache of another model raises a ValueError.
        except ValueError:
            is_good = False
        if not is_good:
            self.damaged.append(os.fspath(path))
        return is_good

    def _holds_context(self, path: Path, sequence: str) -> bool:
        """Whether a cache holds a sequence, under the preset of the model."""
        cache, codes = TurboKVCache.load(path, device="cpu", model=self.turbo.model), self.turbo.codes
        residues = codes.encode(sequence[: self._content.get("truncation_seq_length")], "the sequence")
        rows = zip(cache.token_ids.tolist(), cache.lengths.tolist(), strict=True)
        held = [row[:length] for row, length in rows]
        return cache.config == self.turbo.model.base_model.turbo_config and held == [[codes.cls, *residues]]


def merge_folders(out: Path, folders: Sequence[Path], orders: Sequence[Sequence[int]]) -> None:
    """Join folders of embeddings, by links to their files where the file system allows them.

    Args:
        out: the folder to write; if it exists, its embeddings are kept.
        folders: see `joined_rows`, as are `orders`, which are the order of the joined index.

    Raises:
        ValueError: the settings differ, or another process is writing to `out`.
        OSError: a file cannot be written.
    """
    settings, rows = joined_rows(folders, orders)
    with only_writer(out):
        if (out / SETTINGS_FILE).exists():
            check_same_settings(out, read_settings(out), settings)
        index = EmbeddingIndex(out / INDEX_FILE)
        for folder, (identifier, residues, *names) in rows:
            for name in filter(None, names):
                link_file(folder / name, out / name)
            index.add(identifier, int(residues), names)
        link_file(folders[0] / SETTINGS_FILE, out / SETTINGS_FILE)
        index.commit()
        index.sort([identifier for _, (identifier, *_) in rows])


def joined_rows(
    folders: Sequence[Path], orders: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[tuple[Path, list[str]]]]:
    """The settings of folders, and the rows of all their indices, each with its folder.

    Args:
        folders: of embeddings.
        orders: for every folder, the numbers of its proteins in the order of its index; the rows are in the order of
            the numbers.

    Raises:
        ValueError: the settings differ.
    """
    settings = read_settings(folders[0])
    rows: list[tuple[int, Path, list[str]]] = []
    for folder, order in zip(folders, orders, strict=True):
        check_same_settings(folder, read_settings(folder), settings)
        own = EmbeddingIndex(folder / INDEX_FILE).rows
        rows += ((number, folder, row) for number, row in zip(order, own, strict=True))
    return settings, [(folder, row) for _, folder, row in sorted(rows)]
