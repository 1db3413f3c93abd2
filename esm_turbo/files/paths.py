"""Check that a file can be written, before any work is done for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


class NotWritableError(OSError, ValueError):
    """An output cannot be written; found before any work was done."""


def check_writable(path: str | os.PathLike[str]) -> None:
    """Make sure that a file can be written, missing folders included. Leaves nothing behind.

    Raises:
        NotWritableError: it cannot be written, or is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise NotWritableError(f"{path}: is a folder; name a file")
    if is_device(path):
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


def check_apart(outputs: Iterable[str | os.PathLike[str]], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Make sure that no output overwrites an input or another output.

    Raises:
        NotWritableError: an output is the same file as an input or another output, under any name.
    """
    read = {os.path.realpath(path) for path in inputs}
    written: set[str] = set()
    for path in outputs:
        target = os.path.realpath(path)
        # A device or a pipe has no content to lose, and may be both.
        if os.path.exists(target) and not os.path.isfile(target):
            continue
        if target in read:
            raise NotWritableError(f"{os.fspath(path)}: is an input of this command; name another file to write")
        if target in written:
            raise NotWritableError(f"{os.fspath(path)}: is named for two outputs; name another file for one of them")
        written.add(target)


def is_device(path: str | os.PathLike[str]) -> bool:
    """Whether a path is something other than a file or a folder: a device or a pipe."""
    path = Path(path)
    return path.exists() and not path.is_file() and not path.is_dir()
