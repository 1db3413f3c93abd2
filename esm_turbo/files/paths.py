"""Check where files may be written, before any work is done for them."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from esm_turbo.files.extras import pyarrow
from esm_turbo.files.kinds import CALIBRATION_FILE, PARQUET_KIND, binary_kind, is_checkpoint, is_embeddings, is_store
from esm_turbo.files.suffixes import PARQUET, check_folder_name, check_suffix

_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"(?:/dev|/proc/self)/fd/(\d+)", re.ASCII)


class NotWritableError(OSError, ValueError):
    """An output cannot be written; found before any work was done."""


def check_writable(path: str | os.PathLike[str]) -> None:
    """Make sure that a file can be written, missing folders included. Leaves nothing behind.

    Raises:
        NotWritableError: it cannot be written, or is a folder.
    """
    path = Path(path)
    if descriptor_of(path) == 0:
        raise NotWritableError(f"{path}: is standard input (-), where results cannot go; name a file, or /dev/stdout")
    if path.is_dir():
        raise NotWritableError(f"{path}: is a folder; name a file")
    if keeps_its_content(path):
        # Opening it could block until a reader opens it.
        if not os.access(path, os.W_OK):
            raise NotWritableError(f"{path}: cannot be written (Permission denied); choose another path")
        return
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"{folder} is not a folder" if not folder.is_dir() else error.strerror or str(error)
        raise NotWritableError(f"{path}: cannot be written ({reason}); choose another path") from error


class Output(NamedTuple):
    """A file or folder to write.

    Attributes:
        path: as given.
        holds: what is written; embeddings and contexts are folders.
        suffixes: of its name, if any.
    """

    path: str | os.PathLike[str]
    holds: Literal["text", "picture", "calibration", "HDF5", "Parquet", "embeddings", "contexts"]
    suffixes: tuple[str, ...] = ()


def check_outputs(outputs: Iterable[Output], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Make sure that no output replaces an input, another output or an artifact, or lies inside one.

    A calibration may replace a calibration, and a picture a picture; a calibration may be the
    `calibration.safetensors` of a model. Embeddings and contexts may be added to a folder of their kind.

    Raises:
        NotWritableError: an output does, under any name, or cannot be written.
        SuffixError: (a ValueError) the name of an output promises another format, or a file for a folder.
        ImportError: an output is Parquet, and pyarrow is missing.
    """
    taken = [(path, "an input of this command") for path in inputs]
    for output in outputs:
        path = Path(output.path)
        is_folder = output.holds in ("embeddings", "contexts")
        if not is_folder:
            check_writable(path)
        elif path.is_file():
            raise NotWritableError(f"{path}: is a file; name a folder to write")
        # A device or a pipe has no content to lose, and may be an input too.
        if keeps_its_content(path):
            continue
        place = Path(os.path.realpath(path))
        of_a_model = output.holds == "calibration" and place.name == CALIBRATION_FILE
        for other, what in taken:
            if _same(place, other):
                raise NotWritableError(f"{path}: is {what}; name another path to write")
            inside = place.is_relative_to(os.path.realpath(other)) and not os.path.isfile(other)
            if inside and not (of_a_model and _same(place.parent, other)):
                raise NotWritableError(f"{path}: lies in {os.fspath(other)}, {what}; name another path to write")
        own = place if is_folder else None
        for folder in (place, *place.parents):
            kinds = {
                "a store of contexts": is_store(folder) and (folder, output.holds) != (own, "contexts"),
                "a folder of embeddings": is_embeddings(folder) and (folder, output.holds) != (own, "embeddings"),
                "the folder of a model": folder in (place, place.parent) and is_checkpoint(folder) and not of_a_model,
            }
            for kind in (kind for kind, applies in kinds.items() if applies):
                where = f"is {kind}" if folder == place else f"lies in {folder}, {kind}"
                raise NotWritableError(f"{path}: {where}; name another path to write")
        replaced = binary_kind(place) if output.holds in ("text", "picture", "calibration") else None
        same = f"a {output.holds}" if place.suffix.lower() != PARQUET else PARQUET_KIND
        if replaced is not None and replaced != same:
            raise NotWritableError(f"{path}: is {replaced}, which would be replaced; name another path to write")
        if output.suffixes and check_suffix(path, output.suffixes) == PARQUET:
            pyarrow()
        if output.holds == "contexts":
            check_folder_name(path)
        taken.append((path, "another output"))


def _same(place: Path, other: str | os.PathLike[str]) -> bool:
    """True if two paths lead to the same file, also where names are case-insensitive."""
    if place == Path(os.path.realpath(other)):
        return True
    return place.exists() and os.path.exists(other) and os.path.samefile(place, other)


def is_device(path: str | os.PathLike[str]) -> bool:
    """True if a path is something other than a file or a folder: a device or a pipe."""
    path = Path(path)
    return path.exists() and not path.is_file() and not path.is_dir()


def descriptor_of(path: str | os.PathLike[str]) -> int | None:
    """Number of the open file that a path stands for, such as 1 of `/dev/stdout`; None for other paths."""
    text = os.fspath(path)
    match = _DESCRIPTOR.fullmatch(text)
    return int(match[1]) if match else _STREAMS.get(text)


def keeps_its_content(path: str | os.PathLike[str]) -> bool:
    """True if what is written to a path follows what was written before: a device, a pipe, or a file that is open."""
    return descriptor_of(path) is not None or is_device(path)
