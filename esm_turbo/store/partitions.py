"""Contexts of one preset and calibration in a store, and those that are written but not yet among them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esm_turbo.config import TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.fingerprint import same_codec
from esm_turbo.files.writing import file_errors, locked_temporary, refuse_links, replacing
from esm_turbo.store.flat import ContextSpec, FlatContext

FORMAT_VERSION = 4
PARTITION_FILE = "shelf.safetensors"
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Partition:
    """Contexts of one preset and calibration.

    Attributes:
        folder: of its files.
        config: options under which the contexts are stored.
        codec_fingerprint: of the calibration.
        model: digest of the model's identity: files may come here from the store of another one.
    """

    folder: Path
    config: TurboConfig
    codec_fingerprint: npt.NDArray[np.float32]
    model: str

    @property
    def name(self) -> str:
        return self.folder.name

    @classmethod
    def of(cls, store: Path, spec: ContextSpec) -> Partition:
        """A new partition for the contexts that a model writes."""
        fingerprint = spec.codec.fingerprint
        model = spec.identity.digest
        digest = hashlib.sha256(np.ascontiguousarray(fingerprint).tobytes() + model.encode()).hexdigest()[:8]
        return cls(store / f"{spec.config.name}-{digest}", spec.config, fingerprint, model)

    @classmethod
    def read(cls, path: Path) -> Partition:
        """Reads a partition's file.

        Raises:
            ArtifactError: the file is damaged or of another version.
        """
        tensors, metadata = read_artifact(path, "context_shelf", FORMAT_VERSION)
        try:
            config = TurboConfig.from_dict(metadata["config"])
            return cls(path.parent, config, tensors["codec_fingerprint"].numpy(), metadata["model"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}") from error

    def write(self) -> None:
        path = self.folder / PARTITION_FILE
        metadata = {"config": self.config.to_dict(), "model": self.model}
        fingerprint = torch.from_numpy(np.ascontiguousarray(self.codec_fingerprint))
        refuse_links(self.folder, self.folder.parent)
        with replacing(path, inside=True) as temporary:
            write_artifact(temporary, "context_shelf", FORMAT_VERSION, {"codec_fingerprint": fingerprint}, metadata)

    def is_like(self, other: Partition) -> bool:
        """True if its contexts are of the same kind as those of another one, perhaps of another store."""
        same = self.config == other.config and self.model == other.model
        return same and same_codec(self.codec_fingerprint, other.codec_fingerprint)

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
        tensors, metadata = read_artifact(path, "context", FORMAT_VERSION, mapped=True)
        if (metadata.get("key"), metadata.get("shelf"), metadata.get("model")) != (key, self.name, self.model):
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
        """Opens a folder for contexts that are put among the others later; any number of processes may have one."""
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
        metadata = {
            "key": key,
            "shelf": self.partition.name,
            "model": self.partition.model,
            "layout": context.description(),
        }
        with file_errors(self.partition.path(key)):
            path.touch()
            mode = path.stat().st_mode
            write_artifact(path, "context", FORMAT_VERSION, {"data": context.buffer}, metadata)
            path.chmod(mode)

    @contextlib.contextmanager
    def writing(self, contexts: Iterable[tuple[str, FlatContext]], writers: int = 1) -> Iterator[Callable[[], None]]:
        """Writes contexts, each with its key, while the block runs. Its end stops that.

        Args:
            contexts: on the host; each is taken when a thread is free to write it.
            writers: number of threads. Hashing and writing leave the interpreter to others.

        Yields:
            A function that waits until all are written, and raises as `write`. Nothing is being written any more then.
        """
        left, taking, stopped = iter(contexts), threading.Lock(), threading.Event()

        def take() -> tuple[str, FlatContext] | None:
            with taking:
                return None if stopped.is_set() else next(left, None)

        def write() -> None:
            try:
                while (one := take()) is not None:
                    self.write(*one)
            except BaseException:
                stopped.set()
                raise

        with ThreadPoolExecutor(writers) as threads:
            written = [threads.submit(write) for _ in range(writers)]

            def wait() -> None:
                errors = [one.exception() for one in written]
                for error in filter(None, errors):
                    raise error

            try:
                yield wait
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


def _files(partition: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(partition) as folders:
        for folder in folders:
            if folder.is_dir() and not folder.name.startswith("."):
                with os.scandir(folder) as entries:
                    yield from (
                        e for e in entries if e.name.endswith(_SUFFIX) and not (e.name.startswith(".") or e.is_dir())
                    )
