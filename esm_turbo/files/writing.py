"""Folders that one process at a time writes into, and errors that say so when a file cannot be written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

LOCK_FILE = ".lock"
# What `artifacts.replacing`, and safetensors by itself, leave behind where their process is killed.
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp|\.tmp[A-Za-z0-9]{6}")


class FolderBusyError(OSError, ValueError):
    """Another process writes into the folder."""


@contextlib.contextmanager
def only_writer(folder: str | os.PathLike[str], *, timeout: float = 0.0, keep: bool = False) -> Iterator[None]:
    """Makes sure that nobody else writes into a folder. The system ends the hold of a process that dies.

    Args:
        folder: made if need be.
        timeout: seconds to wait for another writer.
        keep: leave the lock's file behind; else it goes, and so does a folder that is empty afterwards.

    Raises:
        FolderBusyError: another process writes into it, still after `timeout`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    lock = FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except Timeout:
        waited = f" (waited {timeout:g} s)" if timeout else ""
        raise FolderBusyError(
            f"{folder}: another process is writing into it{waited}; let it finish, or give another folder"
        ) from None
    try:
        yield
    finally:
        if not keep:
            # Before the release: afterwards the file may be another's.
            path.unlink(missing_ok=True)
        lock.release()
        if not keep:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what libraries raise when the system refuses a file into an OSError that names it.

    Raises:
        OSError: the file or folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise _named(path, error.strerror or str(error), error.errno) from error
    except SafetensorError as error:
        raise _named(path, str(error), None) from error


def remove_temporaries(folder: str | os.PathLike[str], prefix: str = ".") -> None:
    """Removes half-written files that a killed process left in a folder; only for its writer.

    Args:
        folder: where to look, not below it.
        prefix: how the names begin.
    """
    for path in Path(folder).iterdir():
        if path.name.startswith(prefix) and is_temporary(path.name):
            path.unlink(missing_ok=True)


def is_temporary(name: str) -> bool:
    """Whether a file is one that is being written, or was."""
    return _TEMPORARY.fullmatch(name) is not None


def _named(path: str | os.PathLike[str], reason: str, number: int | None) -> OSError:
    error = OSError(f"{os.fspath(path)}: cannot be written ({reason})")
    error.errno = number
    return error
