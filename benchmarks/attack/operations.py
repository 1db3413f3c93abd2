"""Operations on the files of a folder, counted in the process that makes them, and disturbed at one of them."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Disturbance = Literal["kill", "half", "full", "read-only"]
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_AUDITED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


class Operations:
    """Counts every operation that changes files of a folder, and disturbs the process at one of them.

    Python reports opened, renamed and removed files to audit hooks. Writes are counted where they are made: by `os`, by
    file objects, by safetensors and by h5py.

    Args:
        folder: whose files count, with its subfolders.
        at: number of the disturbed operation, from 0; None disturbs none.
        how: `kill` ends the process before the operation, `half` in the middle of a write; `full` lets this and all
            later operations that need room fail, `read-only` all that change anything.
    """

    def __init__(self, folder: Path, at: int | None = None, how: Disturbance = "kill") -> None:
        self.folder = os.path.realpath(folder)
        self.at = at
        self.how = how
        self.count = 0
        self._inside = False

    def install(self) -> None:
        """Begin to count, for the rest of the process."""
        sys.addaudithook(self._audit)
        self._wrap_os()
        self._wrap_files()
        self._wrap_libraries()

    def report(self, path: Path) -> None:
        """Write the count to a file when the fork ends."""
        end = os._exit

        def leave(code: int) -> None:
            self._inside = True
            path.write_text(str(self.count))
            end(code)

        os._exit = leave  # type: ignore[assignment]

    def step(self, half: Callable[[], object] | None = None, *, needs_room: bool = True, path: Any = None) -> None:
        """One operation.

        Args:
            half: makes half of it.
            needs_room: whether a full disk lets it fail.
            path: that the error names, as Python's own do where an operation is given a path.
        """
        number, self.count = self.count, self.count + 1
        if self.at is None or number < self.at:
            return
        if self.how in ("kill", "half"):
            if self.how == "half" and half is not None:
                self._inside = True
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if needs_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _is_ours(self, path: Any) -> bool:
        if self._inside or not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.path.abspath(os.fsdecode(path))
        return name == self.folder or name.startswith(self.folder + os.sep)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writing = any(letter in mode for letter in "wax+") if isinstance(mode, str) else (flags or 0) & _WRITING
            if writing and self._is_ours(path):
                # With O_TMPFILE or O_CREAT a new file needs room.
                self.step(path=path)
        elif event in _AUDITED and any(self._is_ours(path) for path in arguments[:2]):
            self.step(needs_room=event in ("os.mkdir", "os.link", "os.symlink"), path=arguments[0])

    def _wrap_os(self) -> None:
        write, fsync = os.write, os.fsync

        def counted_write(descriptor: int, data: Any) -> int:
            if self._is_open_here(descriptor):
                self.step(lambda: write(descriptor, bytes(data)[: len(data) // 2]))
            return write(descriptor, data)

        def counted_fsync(descriptor: Any) -> None:
            if self._is_open_here(descriptor if isinstance(descriptor, int) else descriptor.fileno()):
                self.step(needs_room=False)
            fsync(descriptor)

        os.write, os.fsync = counted_write, counted_fsync

    def _is_open_here(self, descriptor: int) -> bool:
        try:
            return self._is_ours(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            return False

    def _wrap_files(self) -> None:
        opened = io.open

        def counted_open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            stream = opened(file, mode, *arguments, **options)
            if any(letter in mode for letter in "wax+") and self._is_ours(file):
                return _File(stream, self)
            return stream

        builtins.open = io.open = counted_open

    def _wrap_libraries(self) -> None:
        import h5py
        import safetensors.torch

        serialize = safetensors.torch.serialize_file

        def counted_serialize(tensors: Any, filename: Any, *arguments: Any, **options: Any) -> None:
            def half() -> None:
                serialize(tensors, filename, *arguments, **options)
                os.truncate(filename, os.path.getsize(filename) // 2)

            if self._is_ours(filename):
                self.step(half)
            serialize(tensors, filename, *arguments, **options)

        safetensors.torch.serialize_file = counted_serialize
        for owner, names in ((h5py.Group, ("create_dataset", "create_group")), (h5py.File, ("flush", "close"))):
            for name in names:
                setattr(owner, name, self._counted_method(getattr(owner, name)))

    def _counted_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(this: Any, *arguments: Any, **options: Any) -> Any:
            if this and self._is_ours(this.file.filename):
                self.step(needs_room=False)
            return method(this, *arguments, **options)

        return counted


class _File:
    """A file whose writes are counted."""

    def __init__(self, stream: Any, operations: Operations) -> None:
        self._stream = stream
        self._operations = operations

    def write(self, data: Any) -> Any:
        self._operations.step(lambda: (self._stream.write(data[: len(data) // 2]), self._stream.flush()))
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _File:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._stream.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._stream)
