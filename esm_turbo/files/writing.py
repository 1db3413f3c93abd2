"""Write files: atomically, one process per folder at a time, with errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from esm_turbo.files.paths import NotWritableError, descriptor_of, keeps_its_content

LOCK_FILE = ".lock"
# Errors that another attempt would meet again.
_NEVER_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[a-z0-9_]{8}\.tmp")


# New temporary folders that others may remove before one is locked.
_ATTEMPTS = 20


class _TakenError(Exception):
    """Another process holds or removed a temporary."""


class FolderBusyError(OSError, ValueError):
    """Another process is writing into the folder."""


class WritingError(OSError):
    """A file or folder cannot be written.

    Attributes:
        reason: why.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, number: int | None) -> None:
        super().__init__(f"{os.fspath(path)}: cannot be written ({reason})")
        self.reason, self.errno = reason, number


def is_full_disk(error: BaseException) -> bool:
    """True of an error in writing to a disk that has no room left, or none for this user or process."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, inside: bool = False) -> Iterator[Path]:
    """Yield a temporary path on the same disk, renamed to `path` on success and removed on failure.

    The temporary lies in a hidden folder of its own beside `path`, with all that libraries write beside it. The folder
    is locked as long as its process lives, so that others can tell what killed processes left behind.

    If `path` is a link, the file that it points to is replaced. A device or a pipe, and an open file, such as
    `/dev/stdout` wherever it leads, is kept and written to on success.

    Args:
        path: the file.
        inside: it lies in a folder of this package, where a link is replaced and not followed; the folder's writer
            removes what killed processes left. Elsewhere, what they left of the same file is removed here.

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    path = Path(path)
    if is_temporary(path.parent.name):
        # Part of a larger write, which renames it.
        yield path
        return
    copied = not inside and keeps_its_content(path)
    if not (inside or copied) and path.is_symlink():
        path = Path(os.path.realpath(path))
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (inside or copied):
            remove_temporaries(path.parent, path.name)
        with locked_temporary(Path(tempfile.gettempdir()) if copied else path.parent, path.name) as folder:
            temporary = folder / path.name
            temporary.touch()
            mode = temporary.stat().st_mode
            yield temporary
            if copied:
                number = descriptor_of(path)
                sys.stdout.flush()
                # Opened by its name, a file that output is redirected to would be emptied.
                opened = path.open("wb") if number is None else os.fdopen(os.dup(number), "wb")
                with temporary.open("rb") as source, opened as target:
                    shutil.copyfileobj(source, target)
                return
            os.chmod(temporary, mode)
            os.replace(temporary, path)


def link_file(source: Path, target: Path) -> None:
    """Put a file into a folder of this package, whole or not at all: a hard link where there are any, or a copy."""
    with replacing(target, inside=True) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


@contextlib.contextmanager
def locked_temporary(parent: Path, name: str) -> Iterator[Path]:
    """Yield a temporary folder that this process keeps locked, and remove it in the end."""
    claim = None
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent))
        try:
            claim = _lock(folder)
            break
        except _TakenError:
            # A process that removes what killed ones left came first, or one that looks who is alive.
            shutil.rmtree(folder, ignore_errors=True)
    else:
        raise OSError(errno.EBUSY, "others remove each new temporary folder", os.fspath(parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if claim is not None:
            os.close(claim)


def held_temporaries(parent: Path, name: str) -> Iterator[Path]:
    """Yield the temporary folders of this name that a living process keeps locked; none where locks do not work."""
    for path in parent.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or found["name"] != name:
            continue
        try:
            claim = _lock(path)
        except _TakenError:
            yield path
        else:
            if claim is not None:
                os.close(claim)


def _lock(path: Path) -> int | None:
    """Lock a temporary until the handle is closed or the process ends; None where files cannot be locked.

    Raises:
        _TakenError: another process holds or removed it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise _TakenError from error
    except OSError:
        return None
    try:
        # Imported here because Windows lacks it.
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.lstat(path)):
            return handle
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(handle)
        raise _TakenError from error
    except (OSError, ImportError):
        os.close(handle)
        return None
    # Removed and made again by another process.
    os.close(handle)
    raise _TakenError


@contextlib.contextmanager
def only_writer(
    folder: str | os.PathLike[str], *, timeout: float = 0.0, keep: bool = False, file: Path | None = None
) -> Iterator[None]:
    """Lock a folder against other writers. The operating system releases the lock of a process that dies.

    Args:
        folder: created if needed.
        timeout: seconds to wait for another writer.
        keep: keep the lock file; otherwise it is removed, and so is a folder that is then empty.
        file: the output whose parts the folder holds, which errors name instead.

    Raises:
        FolderBusyError: another process is writing into it, still after `timeout`.
        NotWritableError: it cannot be created there.
        ValueError: its lock file is a symbolic link.
    """
    # Imported here because it loads asyncio, which `--help` does not need. Before 3.21 it took the lock of a file that
    # another process had just removed.
    from filelock import FileLock, Timeout

    folder = Path(folder)
    path = folder / LOCK_FILE
    lock = FileLock(path, timeout=timeout)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(path, folder)
        lock.acquire()
    except Timeout:
        waited = f" (waited {timeout:g} s)" if timeout else ""
        if file is not None:
            raise FolderBusyError(
                f"{file}: another process is writing it{waited}; let it finish, or give another file"
            ) from None
        raise FolderBusyError(
            f"{folder}: another process is writing into it{waited}; let it finish, or give another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NEVER_WRITABLE:
            raise
        reason = f"cannot be written ({error.strerror}); choose another path"
        raise NotWritableError(f"{folder if file is None else file}: {reason}") from error
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


def parts_folder(out: Path) -> Path:
    """Hidden folder with the finished parts of a file that is written at the end of its run."""
    return out.parent / f".{out.name}.parts"


@contextlib.contextmanager
def locked_parts(out: Path) -> Iterator[Path]:
    """The `parts_folder` of a file, locked; it goes when it is empty. Raises as `only_writer`, and refuses links."""
    folder = parts_folder(out)
    refuse_links(folder, out.parent)
    with only_writer(folder, file=out):
        yield folder


@contextlib.contextmanager
def file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the errors that libraries raise when a file cannot be written into an OSError that names it.

    Raises:
        OSError: the file or folder cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        # Whoever reads the output has gone.
        raise
    except (OSError, SafetensorError) as error:
        # safetensors says it in words alone.
        said = _OS_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else said and int(said[1])
        # What is written in several steps is named after the last of them.
        reason = error.reason if isinstance(error, WritingError) else getattr(error, "strerror", None) or str(error)
        raise WritingError(path, reason, number) from error


def remove_temporaries(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove the half-written files of processes that no longer run. Those of running ones are locked, and stay.

    Args:
        folder: searched without its subfolders.
        name: of the file that was being written; None for all files.
    """
    for path in Path(folder).iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or name not in (None, found["name"]):
            continue
        with contextlib.suppress(_TakenError):
            claim = _lock(path)
            if claim is not None:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                os.close(claim)


def refuse_links(path: Path, root: Path) -> None:
    """Make sure that nothing between a folder of this package and a file in it is a symbolic link.

    Raises:
        ValueError: something is; writing would reach files elsewhere.
    """
    for each in (path, *path.parents):
        if each == root:
            return
        if each.is_symlink():
            raise ValueError(f"{each}: is a symbolic link, which is not followed here; remove it")


def is_temporary(name: str) -> bool:
    """True if a file name is that of a file being written, or left half-written."""
    return _TEMPORARY.fullmatch(name) is not None
