"""Files of a store: its header, partitions of contexts of the same kind, and one file per context.

    store.safetensors                   format version, identity of the model
    turbo3-1f2e3d4c/                    a partition: contexts of one preset and calibration
        shelf.safetensors               its options, and the fingerprint of its calibration
        5a/5a0c...b1.safetensors        a context, named by a hash of its tokens
        .batch.x1y2z3w4.tmp/            contexts that a process has computed, not yet among the others
    unfinished.json                     contexts of the batch that is being put among the others
    usage.jsonl                         counts of look-ups
    .lock                               held by the process that is writing

A store belongs to one model, to the bit. Calibrations are compared with a tolerance, and so cannot be part of a name: a
partition is found by comparing with each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.identity import ModelIdentity, lasting_identity
from esm_turbo.files.kinds import STORE_FILE
from esm_turbo.files.writing import (
    LOCK_FILE,
    file_errors,
    held_temporaries,
    is_temporary,
    locked_temporary,
    only_writer,
    remove_temporaries,
    replacing,
)
from esm_turbo.store.flat import ContextSpec
from esm_turbo.store.partitions import FORMAT_VERSION, PARTITION_FILE, Partition

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

_UNFINISHED_FILE = "unfinished.json"
_CLAIM, _KEYS_FILE = "claim", "keys.json"
STORED_KINDS = ("context_shelf", "context")
"""Kinds of artifacts in a store, beside its header."""

_SUFFIX = ".safetensors"
_KEY = re.compile("[0-9a-f]{64}")
_log = logging.getLogger("esm_turbo")


class StoreFiles:
    """Folder of a store.

    Args:
        folder: of a store, or one that can become a store: missing or empty.
        timeout: seconds to wait for another process that is writing.

    Raises:
        ValueError: the folder is something else, was written by another version, or is damaged.
    """

    def __init__(self, folder: Path, timeout: float = 60.0) -> None:
        self.folder = folder
        self.timeout = timeout
        self._writing = threading.RLock()
        self._swept = False
        self._partitions: dict[str, Partition] = {}
        self._reported: set[str] = set()
        self.header: StoreHeader | None = None
        self.read_header()

    def read_header(self) -> None:
        """Reads the header unless it is known, or the store does not exist yet."""
        if self.header is not None:
            return
        path = self.folder / STORE_FILE
        if not path.exists():
            for path_above in (self.folder, *self.folder.absolute().parents):
                if path_above.is_file():
                    raise ValueError(f"{path_above}: is a file; a store is a folder")
            entries = self.folder.iterdir() if self.folder.exists() else ()
            others = [entry.name for entry in entries if not _may_precede_header(entry.name)]
            # Another process may have made the store in the meantime.
            if others and not path.exists():
                raise ValueError(
                    f"{self.folder}: not a context store, but holds {min(others)}; give a new or an empty folder"
                )
        if path.exists():
            try:
                self.header = StoreHeader.read(path)
            except ArtifactError as error:
                raise ArtifactError(f"{error}; restore it from a copy, or give another folder") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time write, and one of its threads, for the duration of the block.

        Raises:
            FolderBusyError: (a ValueError) another process was writing for all of `timeout`.
        """
        with self._writing, only_writer(self.folder, timeout=self.timeout, keep=True):
            yield

    @contextlib.contextmanager
    def claim(self, keys: Sequence[str]) -> Iterator[None]:
        """Claims contexts until the end of the block, so that several processes that fill a store share the work.

        A claim is a temporary folder that its process keeps locked: the operating system releases the lock of a process
        that dies. Where files cannot be locked there are no claims, and contexts are computed twice at worst. Claims
        are made and read under the store's lock, so that they are seen whole.

        Raises:
            OSError: the claim cannot be written.
        """
        with locked_temporary(self.folder, _CLAIM) as folder:
            with file_errors(self.folder):
                (folder / _KEYS_FILE).write_text(json.dumps(list(keys)), encoding="utf-8")
            yield

    def claimed_by_others(self) -> set[str]:
        """Keys that other living processes have claimed, or other stores of this one."""
        keys: set[str] = set()
        for folder in held_temporaries(self.folder, _CLAIM):
            # Its process may just have removed it.
            with contextlib.suppress(OSError, ValueError, TypeError):
                keys.update(json.loads((folder / _KEYS_FILE).read_text(encoding="utf-8")))
        return keys

    def partition(self, spec: ContextSpec) -> Partition | None:
        """Finds the partition of contexts of this kind; None if there is none yet.

        Raises:
            ValueError: the store belongs to another model.
        """
        self.read_header()
        if self.header is None:
            return None
        self.header.check(spec, self.folder)
        return self.like(Partition.of(self.folder, spec))

    def like(self, wanted: Partition) -> Partition | None:
        """Finds the partition of contexts of the same kind as those of another one, perhaps of another store."""
        # Known partitions come first: they need no access to the folder.
        known = itertools.chain(list(self._partitions.values()), self.partitions())
        return next((one for one in known if one.is_like(wanted)), None)

    def prepare(self, spec: ContextSpec) -> Partition:
        """Finds or creates the partition of contexts of this kind, and removes what killed writers left.

        Only for the writer.

        Raises:
            ValueError: the store belongs to another model.
            OSError: writing failed, for example because the disk is full.
        """
        partition, has_header = self.partition(spec), (self.folder / STORE_FILE).exists()
        # The store is new, or somebody has removed it, in whole or in part, while it was in use.
        if not has_header:
            header = StoreHeader(spec.model, spec.geometry, spec.identity)
            header.write(self.folder / STORE_FILE)
            self.header = header
        if partition is None or not (has_header and partition.folder.exists()):
            partition = partition or Partition.of(self.folder, spec)
            partition.write()
            self._partitions[partition.name] = partition
        self.sweep_once()
        self.discard_unfinished()
        return partition

    def partitions(self) -> Iterator[Partition]:
        """Yields the partitions that can be read, and reports the others once."""
        for path in sorted(self.folder.glob(f"*/{PARTITION_FILE}")):
            name = path.parent.name
            if name not in self._partitions:
                try:
                    self._partitions[name] = Partition.read(path)
                except ArtifactError as error:
                    if name not in self._reported:
                        self._reported.add(name)
                        _log.warning("%s; its contexts are ignored until it is written again", error)
                    continue
            yield self._partitions[name]

    @contextlib.contextmanager
    def batch(self, partition: Partition, keys: Sequence[str]) -> Iterator[None]:
        """Puts the contexts of a batch among the others together; only for the writer.

        What a writer that fails or is killed has written of them is removed by the next one (`discard_unfinished`), so
        that the batch is computed again as it was: the rounding of a result depends on its batch.
        """
        if len(keys) < 2:
            yield
            return
        path = self.folder / _UNFINISHED_FILE
        with replacing(path, inside=True) as temporary:
            temporary.write_text(json.dumps({"shelf": partition.name, "keys": list(keys)}), encoding="utf-8")
        yield
        path.unlink()

    def is_unfinished(self) -> bool:
        """True if a batch is being written, or was when its writer was killed."""
        return (self.folder / _UNFINISHED_FILE).exists()

    def discard_unfinished(self) -> None:
        """Removes the contexts of a batch whose writer was killed; only for the writer."""
        path = self.folder / _UNFINISHED_FILE
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            batch = json.loads(path.read_text(encoding="utf-8"))
            for partition in self.partitions():
                if partition.name == batch["shelf"]:
                    for key in filter(_KEY.fullmatch, batch["keys"]):
                        partition.path(key).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def sweep_once(self) -> None:
        """Removes, once, the temporary files of killed writers."""
        if not self._swept and self.folder.exists():
            self.remove_temporaries()
            self._swept = True

    def remove_temporaries(self) -> None:
        """Removes temporary files of killed writers; only for the writer."""
        remove_temporaries(self.folder)
        for folder in (*self.folder.glob("*-*"), *self.folder.glob("*-*/*")):
            if folder.is_dir() and not (folder.is_symlink() or folder.parent.is_symlink()):
                remove_temporaries(folder)


@dataclass(frozen=True)
class StoreHeader:
    """Header of a store: the model that it belongs to."""

    model: str
    geometry: Geometry
    identity: ModelIdentity

    @classmethod
    def read(cls, path: Path) -> StoreHeader:
        """Reads a header.

        Raises:
            ArtifactError: the file is damaged or of another version.
        """
        _, metadata = read_artifact(path, "context_store", FORMAT_VERSION)
        try:
            identity = ModelIdentity.from_dict(metadata["identity"])
            return cls(metadata["model"], Geometry(**metadata["geometry"]), identity)
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}") from error

    def write(self, path: Path) -> None:
        metadata = {"model": self.model, "geometry": self.geometry.to_dict(), "identity": self.identity.to_dict()}
        with replacing(path, inside=True) as temporary:
            write_artifact(temporary, "context_store", FORMAT_VERSION, {}, metadata)

    def check(self, spec: ContextSpec | StoreHeader, folder: Path) -> None:
        """Makes sure that the store belongs to the model, or that of another store.

        Raises:
            ValueError: it belongs to another model.
        """
        if difference := self.geometry.unlike(spec.geometry):
            raise ValueError(f"{folder}: holds contexts of {self.model}, {difference}; give another folder")
        if difference := self.identity.difference(spec.identity):
            raise ValueError(
                f"{folder}: holds contexts of another model, {self.model}: {difference}; give another folder"
            )


def stored_info(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Contents of one file of a store, after verifying its checksum.

    Args:
        path: the file.
        kind: one of `STORED_KINDS`.

    Raises:
        ArtifactError: (a ValueError) the file is damaged, or of another format version.
    """
    tensors, metadata = read_artifact(path, kind, FORMAT_VERSION)
    size = sum(tensor.nbytes for tensor in tensors.values())
    shown = {name: value for name, value in metadata.items() if name != "layout"}
    return {"kind": kind, **shown, "bytes": size}


def context_spec(
    turbo: ContextModel, config: TurboConfig | None = None, known: ModelIdentity | None = None
) -> ContextSpec:
    """Kind of the contexts that a model writes.

    Args:
        turbo: the model.
        config: options under which they are stored; None is the model's own preset.
        known: see `lasting_identity`.

    Raises:
        ValueError: the model's preset needs a calibration, and there is none, or the model cannot be identified, see
            `ModelIdentity.check_lasting`.
    """
    esm = turbo.model.base_model
    config = esm.turbo_config if config is None else config
    return ContextSpec(
        config=config,
        geometry=Geometry.of(esm.config),
        identity=lasting_identity(esm, known),
        codec=esm.codec(config),
        model=turbo.name,
    )


def _may_precede_header(name: str) -> bool:
    """True if a writer may create a file before the store's header."""
    return name == LOCK_FILE or is_temporary(name)
