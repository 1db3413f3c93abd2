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
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.fingerprint import same_codec
from esm_turbo.files.identity import ModelIdentity, lasting_identity
from esm_turbo.files.kinds import STORE_FILE
from esm_turbo.files.writing import (
    LOCK_FILE,
    file_errors,
    is_temporary,
    locked_temporary,
    refuse_links,
    remove_temporaries,
    replacing,
)
from esm_turbo.store.flat import ContextSpec, FlatContext

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

FORMAT_VERSION = 3
PARTITION_FILE = "shelf.safetensors"
_UNFINISHED_FILE = "unfinished.json"
STORED_KINDS = ("context_shelf", "context")
"""Kinds of artifacts in a store, beside its header."""

_SUFFIX = ".safetensors"
_KEY = re.compile("[0-9a-f]{64}")
_log = logging.getLogger("esm_turbo")


class StoreFiles:
    """Folder of a store.

    Args:
        folder: of a store, or one that can become a store: missing or empty.

    Raises:
        ValueError: the folder is something else, was written by another version, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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

    def partition(self, spec: ContextSpec) -> Partition | None:
        """Finds the partition of contexts of this kind; None if there is none yet.

        Raises:
            ValueError: the store belongs to another model.
        """
        self.read_header()
        if self.header is None:
            return None
        self.header.check(spec, self.folder)
        # Known partitions come first: they need no access to the folder.
        for partition in itertools.chain(list(self._partitions.values()), self.partitions()):
            if partition.matches(spec):
                return partition
        return None

    def make_partition(self, spec: ContextSpec) -> Partition:
        """Finds or creates the partition of contexts of this kind; only for the writer.

        Raises:
            ValueError: the store belongs to another model.
            OSError: writing failed, for example because the disk is full.
        """
        partition, has_header = self.partition(spec), (self.folder / STORE_FILE).exists()
        if partition is not None and has_header and partition.folder.exists():
            return partition
        # The store is new, or somebody has removed it, in whole or in part, while it was in use.
        if not has_header:
            header = StoreHeader(spec.model, spec.geometry, spec.identity)
            header.write(self.folder / STORE_FILE)
            self.header = header
        partition = partition or Partition.of(self.folder, spec)
        partition.write()
        self._partitions[partition.name] = partition
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

    def like(self, other: Partition) -> Partition | None:
        """Finds the partition of contexts of the same kind as those of another store; None if there is none."""
        return next((own for own in self.partitions() if own.is_like(other)), None)

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


@dataclass(frozen=True)
class Partition:
    """Contexts of one preset and calibration.

    Attributes:
        folder: of its files.
        config: options under which the contexts are stored.
        codec_fingerprint: of the calibration.
    """

    folder: Path
    config: TurboConfig
    codec_fingerprint: npt.NDArray[np.float32]

    @property
    def name(self) -> str:
        return self.folder.name

    @classmethod
    def of(cls, store: Path, spec: ContextSpec) -> Partition:
        """A new partition for the contexts that a model writes."""
        fingerprint = spec.codec.fingerprint
        digest = hashlib.sha256(np.ascontiguousarray(fingerprint).tobytes()).hexdigest()[:8]
        return cls(store / f"{spec.config.name}-{digest}", spec.config, fingerprint)

    @classmethod
    def read(cls, path: Path) -> Partition:
        """Reads a partition's file.

        Raises:
            ArtifactError: the file is damaged or of another version.
        """
        tensors, metadata = read_artifact(path, "context_shelf", FORMAT_VERSION)
        try:
            config = TurboConfig.from_dict(metadata["config"])
            return cls(path.parent, config, tensors["codec_fingerprint"].numpy().copy())
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}") from error

    def write(self) -> None:
        path = self.folder / PARTITION_FILE
        metadata = {"config": self.config.to_dict()}
        fingerprint = torch.from_numpy(np.ascontiguousarray(self.codec_fingerprint))
        refuse_links(self.folder, self.folder.parent)
        with replacing(path, inside=True) as temporary:
            write_artifact(temporary, "context_shelf", FORMAT_VERSION, {"codec_fingerprint": fingerprint}, metadata)

    def matches(self, spec: ContextSpec) -> bool:
        """True if its contexts are of this kind."""
        return self.config == spec.config and same_codec(self.codec_fingerprint, spec.codec.fingerprint)

    def is_like(self, other: Partition) -> bool:
        """True if its contexts are of the same kind as those of a partition of another store."""
        return self.config == other.config and same_codec(self.codec_fingerprint, other.codec_fingerprint)

    def keys(self) -> Iterator[str]:
        """Keys of all contexts."""
        return (entry.name.removesuffix(_SUFFIX) for entry in _files(self.folder))

    def path(self, key: str) -> Path:
        """Path of a context's file, whether or not it exists."""
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def read_context(self, key: str) -> FlatContext | None:
        """Reads and checks a context, mapped into memory; None if there is none.

        Raises:
            ArtifactError: the file is damaged.
        """
        path = self.path(key)
        if not path.exists():
            return None
        if path.is_symlink():
            raise ArtifactError(f"{path}: is a symbolic link, which is not followed here")
        tensors, metadata = read_artifact(path, "context", FORMAT_VERSION)
        if metadata.get("key") != key or metadata.get("shelf") != self.name:
            raise ArtifactError(f"{path}: the file of another context")
        try:
            return FlatContext.from_description(tensors["data"], metadata["layout"])
        except (KeyError, ValueError) as error:
            raise ArtifactError(f"{path}: damaged ({error})") from error

    def write_context(self, key: str, context: FlatContext) -> None:
        """Writes a context, whole or not at all; only for the writer.

        Raises:
            OSError: writing failed, for example because the disk is full.
        """
        with self.staging() as staging:
            staging.write(key, context)
            staging.publish(key)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Staging]:
        """Contexts that are written beside the others, by any number of processes at once, and put among them later."""
        refuse_links(self.folder, self.folder.parent)
        with contextlib.ExitStack() as stack:
            with file_errors(self.folder):
                folder = stack.enter_context(locked_temporary(self.folder, "batch"))
            yield Staging(self, folder)

    def info(self) -> dict[str, Any]:
        """Number and size of the contexts, JSON values."""
        sizes = [entry.stat().st_size for entry in _files(self.folder)]
        return {
            "preset": self.config.name,
            "folder": self.name,
            "contexts": len(sizes),
            "bytes": sum(sizes),
        }


@dataclass(frozen=True)
class Staging:
    """Contexts that are not yet among the others of a partition.

    Attributes:
        partition: which they will be part of.
        folder: a temporary one in it.
    """

    partition: Partition
    folder: Path

    def write(self, key: str, context: FlatContext) -> None:
        """Writes a context.

        Raises:
            OSError: writing failed, for example because the disk is full.
        """
        path = self._path(key)
        metadata = {"key": key, "shelf": self.partition.name, "layout": context.description()}
        with file_errors(self.partition.path(key)):
            path.touch()
            mode = path.stat().st_mode
            write_artifact(path, "context", FORMAT_VERSION, {"data": context.buffer}, metadata)
            path.chmod(mode)

    def write_all(self, contexts: Iterable[tuple[str, FlatContext]], writers: int = 1) -> None:
        """Writes contexts, each with its key.

        Args:
            contexts: on the host; taken as they are written, a few ahead.
            writers: number of threads. Hashing and writing leave the interpreter to others.

        Raises:
            OSError: as of `write`. Nothing is being written any more then.
        """
        if writers == 1:
            for key, context in contexts:
                self.write(key, context)
            return
        with ThreadPoolExecutor(writers) as threads:
            try:
                pending: deque[Future[None]] = deque()
                for key, context in contexts:
                    pending.append(threads.submit(self.write, key, context))
                    if len(pending) > writers:
                        pending.popleft().result()
                for one in pending:
                    one.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    @contextlib.contextmanager
    def writing(self, contexts: Iterable[tuple[str, FlatContext]], writers: int) -> Iterator[Callable[[], None]]:
        """Writes contexts as `write_all` does, with several writers while the block runs. Its end stops them.

        Yields:
            What waits until all are written, and raises as `write_all`.
        """
        if writers == 1:
            self.write_all(contexts)
            yield lambda: None
            return
        stopped = threading.Event()
        until_stopped = itertools.takewhile(lambda _: not stopped.is_set(), contexts)
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(self.write_all, until_stopped, writers)
            try:
                yield written.result
            finally:
                stopped.set()

    def publish(self, key: str) -> None:
        """Puts a context that was written among the others; only for the writer.

        Raises:
            OSError: it failed.
        """
        path = self.partition.path(key)
        refuse_links(path.parent, self.partition.folder.parent)
        with file_errors(path):
            path.parent.mkdir(exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                # Nobody but a stranger makes one here, and a file cannot replace it.
                shutil.rmtree(path)
            os.replace(self._path(key), path)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"


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


def context_spec(turbo: ContextModel, config: TurboConfig | None = None) -> ContextSpec:
    """Kind of the contexts that a model writes.

    Args:
        turbo: the model.
        config: options under which they are stored; None is the model's own preset.

    Raises:
        ValueError: the model's preset needs a calibration, and there is none, or the model cannot be identified, see
            `ModelIdentity.check_lasting`.
    """
    esm = turbo.model.base_model
    config = esm.turbo_config if config is None else config
    return ContextSpec(
        config=config,
        geometry=Geometry.of(esm.config),
        identity=lasting_identity(esm),
        codec=esm.codec(config),
        model=turbo.name,
    )


def _files(partition: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(partition) as folders:
        for folder in folders:
            if folder.is_dir() and not folder.name.startswith("."):
                with os.scandir(folder) as entries:
                    yield from (
                        e for e in entries if e.name.endswith(_SUFFIX) and not (e.name.startswith(".") or e.is_dir())
                    )


def _may_precede_header(name: str) -> bool:
    """True if a writer may create a file before the store's header."""
    return name == LOCK_FILE or is_temporary(name)
