"""Write files: atomically, one process per folder at a time, with errors that name the file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from esm_turbo.files.paths import is_device

LOCK_FILE = ".lock"
# What `replacing`, and safetensors by itself, leave behind when their process is killed.
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp|\.tmp[A-Za-z0-9]{6}")


class FolderBusyError(OSError, ValueError):
    """Another process is writing into the folder."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder, renamed to `path` on success and removed on failure.

    If `path` is a link, the file that it points to is replaced. A device or a pipe, such as `/dev/stdout`, is kept and
    written to on success.
    """
    path = Path(path)
    copied = is_device(path)
    if path.is_symlink() and not copied:
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.gettempdir() if copied else path.parent
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=folder)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if copied:
            with temporary.open("rb") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
            return
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def only_writer(folder: str | os.PathLike[str], *, timeout: float = 0.0, keep: bool = False) -> Iterator[None]:
    """Lock a folder against other writers. The operating system releases the lock of a process that dies.

    Args:
        folder: created if needed.
        timeout: seconds to wait for another writer.
        keep: keep the lock file; otherwise it is removed, and so is a folder that is then empty.

    Raises:
        FolderBusyError: another process is writing into it, still after `timeout`.
    """
    # Imported here because it loads asyncio, which `--help` does not need.
    from filelock import FileLock, Timeout

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
            # Before the release: afterwards the file may belong to another process.
            path.unlink(missing_ok=True)
        lock.release()
        if not keep:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the errors that libraries raise when a file cannot be written into an OSError that names it.

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
    """Remove the half-written files that a killed process left in a folder; for its writer only.

    Args:
        folder: searched without its subfolders.
        prefix: of the names to remove.
    """
    for path in Path(folder).iterdir():
        if path.name.startswith(prefix) and is_temporary(path.name):
            path.unlink(missing_ok=True)


def is_temporary(name: str) -> bool:
    """Whether a file name is that of a file being written, or left half-written."""
    return _TEMPORARY.fullmatch(name) is not None


def _named(path: str | os.PathLike[str], reason: str, number: int | None) -> OSError:
    error = OSError(f"{os.fspath(path)}: cannot be written ({reason})")
    error.errno = number
    return error
