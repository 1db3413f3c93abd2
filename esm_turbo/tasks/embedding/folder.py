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
from esm_turbo.proteins.lookup import listed
from esm_turbo.tasks.common.options import EmbeddingFormat, FileNames
from esm_turbo.tasks.embedding.files import (
    CACHE_SUFFIX,
    PartFiles,
    SameSequence,
    check_same_settings,
    file_suffixes,
    is_hashed,
    read_entry,
    read_settings,
    safe_labels,
    sequence_hash,
)
from esm_turbo.tasks.embedding.index import EmbeddingIndex

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

_log = logging.getLogger("esm_turbo")


class EmbeddingFolder:
    """A folder with one file per sequence, and one for its cache: their names, and the index.

    Args:
        folder: a folder that no other process writes to.
        file_format: format of the files.
        settings: see `records.embedding_writer`.
        labels: see `safe_labels`; files of other sequences are named by their hash, as are all if this is None.
        names: whether labels are used; None does as the folder does, and uses them in a new one.
        device: what computes the embeddings.

    Attributes:
        damaged: names of existing files or entries that cannot be used and must be computed again.
        recorded: what is recorded beside the settings, and may differ between runs.
        replaced: hashes of the sequences whose files are to be written.

    Raises:
        ValueError: the folder holds embeddings made with other settings, or an index that is not one of embeddings.
        OSError: by all methods that write, if a file cannot be written. An earlier version of it stays as it was.
    """

    def __init__(
        self,
        folder: Path,
        file_format: EmbeddingFormat,
        settings: Mapping[str, Any],
        labels: Mapping[str, Sequence[str]] | None,
        names: FileNames | None,
        device: str,
    ) -> None:
        self.damaged: list[str] = []
        self.replaced: list[str] = []
        self.folder, self.suffixes = folder, file_suffixes(file_format, settings["include"])
        for own in (INDEX_FILE, SETTINGS_FILE):
            refuse_links(self.folder / own, self.folder)
        self.recorded = {"device": device}
        self._settings = {"format": file_format, **settings}
        self._is_new = not (self.folder / SETTINGS_FILE).exists()
        existing = {"names": "label"} if self._is_new else read_settings(self.folder)
        if labels is None or (names or existing.get("names")) != "label":
            labels = {}
        else:
            self._settings["names"] = "label"
        if not self._is_new:
            check_same_settings(self.folder, existing, self._settings)
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
        self._labels |= {name: own[0] for name, own in labels.items() if self._is_free(name, own)}
        remove_temporaries(self.folder)

    def _is_free(self, name: str, identifiers: Sequence[str]) -> bool:
        """Whether files may be named by the first of these identifiers: no others' are, and none has a hash yet."""
        files = [f"{identifiers[0]}{suffix}" for suffix in self.suffixes]
        if any(map(self._is_another_programs, files)):
            return False
        named = any(set(identifiers) & self.index.identifiers(file) for file in self.files(name).values())
        return not named and all(self.index.identifiers(file) <= set(identifiers) for file in files)

    def _is_another_programs(self, file: str) -> bool:
        """Whether there is such a file that no row names, and that is not what a killed run has left."""
        path = self.folder / file
        if self.index.identifiers(file) or not path.exists():
            return False
        try:
            is_own = TurboKVCache.load(path) is not None if file.endswith(CACHE_SUFFIX) else bool(read_entry(path)[1])
        except ValueError:
            is_own = False
        return self._is_new or not is_own

    def files(self, name: str) -> dict[str, str]:
        """Names of the files of a sequence with this hash, by suffix."""
        return {suffix: f"{self._labels.get(name, name)}{suffix}" for suffix in self.suffixes}

    def begin(self) -> None:
        """Record the settings, before the first file."""
        if self._is_new:
            with replacing(self.folder / SETTINGS_FILE, inside=True) as temporary:
                temporary.write_text(json.dumps(self._settings | self.recorded, indent=2) + "\n", encoding="utf-8")
        self._is_new = False
        # A killed run may leave the file of another sequence under a label, and must leave no row that says otherwise.
        labelled = (name for name in self.replaced if name in self._labels)
        self.index.drop(file for name in labelled for file in self.files(name).values())

    def record(self, name: str, identifier: str, residues: int) -> None:
        """Add a protein whose sequence has this hash to the next `commit`."""
        files = self.files(name)
        cache = files.pop(CACHE_SUFFIX, "")
        self.index.add(identifier, residues, ["".join(files.values()), cache])

    def commit(self) -> None:
        """Make everything added since the last call count as done, even if the process is killed afterwards."""
        with file_errors(self.index.path):
            self.index.commit()

    def finish(self, identifiers: Sequence[str]) -> None:
        """Complete the output, at the end of a run that was not interrupted and has embedded these proteins."""
        self.commit()
        with file_errors(self.index.path):
            self.index.sort(identifiers)
        if "names" not in self._settings:
            return
        there, own = set(os.listdir(self.folder)), {identifier: files for identifier, _, *files in self.index.rows}
        names = ((identifier, f"{identifier}{suffix}") for identifier in identifiers for suffix in self.suffixes)
        if left := [identifier for identifier, name in names if name in there and name not in own[identifier]]:
            _log.warning(
                "%s: its files named %s are older, of other sequences or another program's; %s names those of these",
                self.folder,
                listed(list(dict.fromkeys(left))),
                INDEX_FILE,
            )


class FolderWriter(EmbeddingFolder):
    """A folder of embeddings, and the parts of a run that are added to it.

    Args:
        parts: a temporary folder in the folder, which no other process writes to, for the parts of this run.
        file_format: see `EmbeddingFolder`, as are `settings`, `labels` and `names`.
        turbo: the model, which existing caches must belong to.
        devices: what computes the embeddings; None for the model's own device.

    Attributes:
        parts: writes the parts.
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
        super().__init__(parts.parent, file_format, settings, labels, names, devices or str(turbo.model.device))
        self.turbo, self._content = turbo, dict(settings)
        self.parts = PartFiles(parts, self.suffixes, self._content)
        # safetensors makes files that nobody else can read.
        (parts / "mode").touch()
        self._mode = (parts / "mode").stat().st_mode

    def has(self, proteins: SameSequence) -> bool:
        """Whether an earlier run has embedded these proteins; reads and checks their whole embedding."""
        sequence = proteins[0].sequence
        name = sequence_hash(sequence)
        files = self.files(name).values()
        if not all(self.index.identifiers(file) and self._is_good(file, sequence) for file in files):
            self.replaced.append(name)
            return False
        # Other proteins with this sequence may be new.
        self._record(proteins)
        return True

    def add(self, proteins: SameSequence) -> None:
        """Add proteins whose parts have been written; they count as done after the next `commit`."""
        sequence = proteins[0].sequence
        for suffix, name in self.files(sequence_hash(sequence)).items():
            part = self.parts.path(sequence, suffix)
            with file_errors(self.folder / name):
                os.chmod(part, self._mode)
                os.replace(part, self.folder / name)
        self._record(proteins)

    def _record(self, proteins: SameSequence) -> None:
        name = sequence_hash(proteins[0].sequence)
        for record in proteins:
            self.record(name, record.id, len(record.sequence))

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
    """Join folders of embeddings, whose files are named by hashes, by links where the file system allows them.

    Args:
        out: the folder to write, with names as in a run of all proteins; if it exists, its embeddings are kept.
        folders: see `joined_rows`, as are `orders`, which are the order of the joined index.

    Raises:
        ValueError: the settings differ, `out` has an index that is not one of embeddings, or another process is
            writing to it.
        OSError: a file cannot be written.
    """
    settings, rows = joined_rows(folders, orders)
    file_format, device, names = settings.pop("format"), settings.pop("device"), settings.pop("names", "hash")
    hashes = {identifier: max(files).partition(".")[0] for _, (identifier, _, *files) in rows}
    groups: dict[str, list[str]] = {}
    for identifier, name in hashes.items():
        groups.setdefault(name, []).append(identifier)
    with only_writer(out):
        target = EmbeddingFolder(out, file_format, settings, safe_labels(groups), names, device)
        for path in target.damaged:
            _log.warning("%s: was damaged, and has been written again with the rows that can be read", path)
        target.replaced += groups
        target.begin()
        for folder, (identifier, residues, *_) in rows:
            name = hashes[identifier]
            for suffix, file in target.files(name).items():
                link_file(folder / f"{name}{suffix}", out / file)
            target.record(name, identifier, int(residues))
        target.finish(list(hashes))


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
        own = list(EmbeddingIndex(folder / INDEX_FILE).rows)
        # Those of an earlier run of the shard, on other proteins, come first.
        rows += ((number, folder, row) for number, row in zip(order, own[len(own) - len(order) :], strict=True))
    return settings, [(folder, row) for _, folder, row in sorted(rows)]
