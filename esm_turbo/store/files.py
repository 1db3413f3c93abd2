"""A store's files: what it belongs to, shelves of contexts made alike, and one file a context.

    store.safetensors                   format version, model
    turbo3-float32-1f2e3d4c/            a shelf: contexts of one preset, calibration and dtype
        shelf.safetensors               its options, and the fingerprint of its calibration
        5a/5a0c...b1.safetensors        a context, named by a hash of its tokens
    usage.jsonl                         how often contexts were found
    .lock                               held by the process that is writing

Fingerprints are compared with a tolerance, as everywhere, and so cannot be part of a name: a shelf is found by looking
at those that there are.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.fingerprint import same_codec, same_model
from esm_turbo.files.writing import LOCK_FILE, file_errors, is_temporary, remove_temporaries
from esm_turbo.store.flat import Blueprint, FlatContext

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

FORMAT_VERSION = 1
STORE_FILE = "store.safetensors"
SHELF_FILE = "shelf.safetensors"
_SUFFIX = ".safetensors"
_log = logging.getLogger("esm_turbo")


class StoreFiles:
    """The folder of a store.

    Args:
        folder: of a store, or one that can become one: missing or empty.

    Raises:
        ValueError: it is something else, was written by another version, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shelves: dict[str, Shelf] = {}
        self._reported: set[str] = set()
        self.header: StoreHeader | None = None
        self.read_header()

    def read_header(self) -> None:
        """Looks whether there is a store by now."""
        if self.header is not None:
            return
        path = self.folder / STORE_FILE
        if not path.exists():
            for place in (self.folder, *self.folder.absolute().parents):
                if place.is_file():
                    raise ValueError(f"{place}: is a file; a store is a folder")
            entries = self.folder.iterdir() if self.folder.exists() else ()
            others = [entry.name for entry in entries if not _is_own_beginning(entry.name)]
            # Another process may have made the store in the meantime.
            if others and not path.exists():
                raise ValueError(
                    f"{self.folder}: is no store of contexts, but holds {min(others)}; give a new or an empty folder"
                )
        if path.exists():
            self.header = StoreHeader.read(path)

    def shelf(self, blueprint: Blueprint) -> Shelf | None:
        """The shelf of contexts of this kind, or None where there is none yet.

        Raises:
            ValueError: the store is another model's.
        """
        self.read_header()
        if self.header is None:
            return None
        self.header.check(blueprint, self.folder)
        # Those that are known need no look at the folder.
        for shelf in itertools.chain(list(self._shelves.values()), self.shelves()):
            if shelf.serves(blueprint):
                return shelf
        return None

    def make_shelf(self, blueprint: Blueprint) -> Shelf:
        """The same, made where it is missing; only for the writer.

        Raises:
            ValueError: the store is another model's.
            OSError: the disk is full, or the like.
        """
        if (shelf := self.shelf(blueprint)) is not None:
            return shelf
        if self.header is None:
            header = StoreHeader(blueprint.model, blueprint.geometry, blueprint.fingerprint)
            header.write(self.folder / STORE_FILE)
            self.header = header
        shelf = Shelf.of(self.folder, blueprint)
        shelf.write()
        self._shelves[shelf.name] = shelf
        return shelf

    def shelves(self) -> Iterator[Shelf]:
        """All that can be read; others are reported."""
        for path in sorted(self.folder.glob(f"*/{SHELF_FILE}")):
            name = path.parent.name
            if name not in self._shelves:
                try:
                    self._shelves[name] = Shelf.read(path)
                except ArtifactError as error:
                    if name not in self._reported:
                        self._reported.add(name)
                        _log.warning("%s; its contexts are not used before it is written anew", error)
                    continue
            yield self._shelves[name]

    def remove_temporaries(self) -> None:
        """Removes what killed writers left; only for the writer."""
        remove_temporaries(self.folder)
        for folder in self.folder.glob("*-*"):
            if folder.is_dir():
                remove_temporaries(folder)
                for inner in folder.iterdir():
                    if inner.is_dir():
                        remove_temporaries(inner)


class StoreHeader:
    """Which model a store belongs to."""

    def __init__(self, model: str, geometry: Geometry, fingerprint: npt.NDArray[np.float32]) -> None:
        self.model = model
        self.geometry = geometry
        self.fingerprint = fingerprint

    @classmethod
    def read(cls, path: Path) -> StoreHeader:
        """Raises ArtifactError where the file is damaged or of another version."""
        tensors, metadata = read_artifact(path, "context_store", FORMAT_VERSION)
        try:
            return cls(metadata["model"], Geometry(**metadata["geometry"]), tensors["fingerprint"].numpy().copy())
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}") from error

    def write(self, path: Path) -> None:
        metadata = {"model": self.model, "geometry": asdict(self.geometry)}
        with file_errors(path):
            write_artifact(
                path, "context_store", FORMAT_VERSION, {"fingerprint": torch.from_numpy(self.fingerprint)}, metadata
            )

    def check(self, blueprint: Blueprint, folder: Path) -> None:
        """Raises ValueError where the store is another model's."""
        if self.geometry != blueprint.geometry:
            raise ValueError(
                f"{folder}: holds contexts of {self.model} ({self.geometry}), the model has {blueprint.geometry};"
                " give another folder"
            )
        if not same_model(self.fingerprint, blueprint.fingerprint):
            raise ValueError(
                f"{folder}: holds contexts of another model, {self.model}: the weights differ; give another folder"
            )


class Shelf:
    """Contexts of one preset, calibration and dtype.

    Attributes:
        name: of its folder.
        config: the options under which contexts are stored.
        dtype: that the model computed them in.
    """

    def __init__(
        self, folder: Path, config: TurboConfig, dtype: str, codec_fingerprint: npt.NDArray[np.float32]
    ) -> None:
        self.folder = folder
        self.name = folder.name
        self.config = config
        self.dtype = dtype
        self.codec_fingerprint = codec_fingerprint

    @classmethod
    def of(cls, store: Path, blueprint: Blueprint) -> Shelf:
        """A new one for what a model writes."""
        fingerprint = blueprint.codec.fingerprint
        digest = hashlib.sha256(np.ascontiguousarray(fingerprint).tobytes()).hexdigest()[:8]
        name = f"{blueprint.config.name}-{blueprint.dtype}-{digest}"
        return cls(store / name, blueprint.config, blueprint.dtype, fingerprint)

    @classmethod
    def read(cls, path: Path) -> Shelf:
        """Raises ArtifactError where the file is damaged or of another version."""
        tensors, metadata = read_artifact(path, "context_shelf", FORMAT_VERSION)
        try:
            config = TurboConfig.from_dict(metadata["config"])
            return cls(path.parent, config, metadata["dtype"], tensors["codec_fingerprint"].numpy().copy())
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}") from error

    def write(self) -> None:
        path = self.folder / SHELF_FILE
        metadata = {"config": self.config.to_dict(), "dtype": self.dtype}
        fingerprint = torch.from_numpy(np.ascontiguousarray(self.codec_fingerprint))
        with file_errors(path):
            write_artifact(path, "context_shelf", FORMAT_VERSION, {"codec_fingerprint": fingerprint}, metadata)

    def serves(self, blueprint: Blueprint) -> bool:
        """Whether its contexts are those that a model would write."""
        return (
            self.config == blueprint.config
            and self.dtype == blueprint.dtype
            and same_codec(self.codec_fingerprint, blueprint.codec.fingerprint)
        )

    def path(self, key: str) -> Path:
        """Where the context of a key is, or would be."""
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def read_context(self, key: str) -> FlatContext | None:
        """The context of a key, mapped into memory and checked; None where there is none.

        Raises:
            ArtifactError: its file is damaged.
        """
        path = self.path(key)
        if not path.exists():
            return None
        tensors, metadata = read_artifact(path, "context", FORMAT_VERSION)
        if metadata.get("key") != key or metadata.get("shelf") != self.name:
            raise ArtifactError(f"{path}: is another context's file")
        try:
            return FlatContext.from_description(tensors["data"], metadata["layout"])
        except (KeyError, ValueError) as error:
            raise ArtifactError(f"{path}: damaged ({error})") from error

    def write_context(self, key: str, context: FlatContext) -> None:
        """Writes a context, whole or not at all.

        Raises:
            OSError: the disk is full, or the like.
        """
        path = self.path(key)
        metadata = {"key": key, "shelf": self.name, "layout": context.described()}
        with file_errors(path):
            write_artifact(path, "context", FORMAT_VERSION, {"data": context.buffer}, metadata)

    def info(self) -> dict[str, Any]:
        """How much it holds, JSON values."""
        sizes = [entry.stat().st_size for entry in _files(self.folder)]
        return {
            "preset": self.config.name,
            "dtype": self.dtype,
            "folder": self.name,
            "contexts": len(sizes),
            "bytes": sum(sizes),
        }


def is_store(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a store of contexts, of whatever version."""
    return (Path(folder) / STORE_FILE).is_file()


def blueprint_of(turbo: ContextModel) -> Blueprint:
    """What the contexts that a model writes have in common.

    Raises:
        ValueError: its preset needs a calibration, and there is none.
    """
    cache = turbo.model.new_cache()
    assert cache.codec is not None
    return Blueprint(
        config=cache.config,
        geometry=cache.geometry,
        fingerprint=cache.fingerprint,
        codec=cache.codec,
        model=turbo.name,
        dtype=str(turbo.model.dtype).removeprefix("torch."),
    )


def _files(shelf: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(shelf) as folders:
        for folder in folders:
            if folder.is_dir():
                with os.scandir(folder) as entries:
                    yield from (e for e in entries if e.name.endswith(_SUFFIX) and not e.name.startswith("."))


def _is_own_beginning(name: str) -> bool:
    """Whether a file may stand in a folder before the store's header does."""
    return name == LOCK_FILE or is_temporary(name)
