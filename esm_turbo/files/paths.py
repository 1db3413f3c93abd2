"""Whether a file can be written, asked before any work is done for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


class NotWritableError(OSError, ValueError):
    """A file cannot be written where it was asked for; found out before any work was done."""


def check_writable(path: str | os.PathLike[str]) -> None:
    """Makes sure that a file can be written, its folders made if need be. Leaves nothing behind.

    Raises:
        NotWritableError: it cannot be written, or is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise NotWritableError(f"{path}: is a folder; name a file")
    if path.exists() and not path.is_file():
        # A device or a pipe: to open it could mean to wait for its reader.
        if not os.access(path, os.W_OK):
            raise NotWritableError(f"{path}: cannot be written (Permission denied); choose another place")
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
        raise NotWritableError(f"{path}: cannot be written ({reason}); choose another place") from error


def check_apart(outputs: Iterable[str | os.PathLike[str]], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Makes sure that nothing is written over what is read, and no output over another.

    Raises:
        NotWritableError: an output is the file of an input, or of another output, by whatever name.
    """
    read = {os.path.realpath(path) for path in inputs}
    written: set[str] = set()
    for path in outputs:
        place = os.path.realpath(path)
        # A device or a pipe holds nothing that could be lost, and may be both.
        if os.path.exists(place) and not os.path.isfile(place):
            continue
        if place in read:
            raise NotWritableError(f"{os.fspath(path)}: is read by this command; name another file to write")
        if place in written:
            raise NotWritableError(f"{os.fspath(path)}: is to be written twice; name another file for one of them")
        written.add(place)
