"""Pieces without a model, for tests of who runs them: numbers to square. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Load:
    """A stand-in for a model: the name of its device. Devices may be full, and processes may die when they start."""

    full: tuple[str, ...] = ()
    dying: tuple[str, ...] = ()

    def __call__(self, device: str) -> Any:
        if device in self.full:
            raise MemoryError
        if device in self.dying:
            os.kill(os.getpid(), signal.SIGKILL)
        return device


@dataclass(frozen=True)
class LoadTogether:
    """A stand-in for a model that is loaded once so many processes load theirs, and that is large to send."""

    folder: Path
    count: int
    content: bytes

    def __call__(self, device: str) -> Any:
        (self.folder / str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len(list(self.folder.iterdir())) < self.count:
            if time.monotonic() > end:
                raise RuntimeError("the others wait for this one")
            time.sleep(0.01)
        return device


def begin_with_torch(*arguments: Any) -> None:
    """A worker of a program that imports torch at its head."""
    import torch

    from esm_turbo.parallel.worker import begin

    torch.set_num_threads(3)
    begin(*arguments)


class Threads:
    """In place of a model: the number of PyTorch's threads, as the reason why it cannot be loaded."""

    def __call__(self, device: str) -> Any:
        import torch

        raise RuntimeError(f"{torch.get_num_threads()} threads")


def die_at_once(*_: object) -> None:
    """A worker that is killed as it starts."""
    os.kill(os.getpid(), signal.SIGKILL)


class Failing:
    """What pieces that no process survives, or that fail, return."""

    def failed(self, piece: Any, reason: str) -> tuple[int, str]:
        return -1, reason

    def has_failed(self, result: Any) -> bool:
        return isinstance(result, tuple) and result[0] < 0


@dataclass(frozen=True)
class Squares(Failing):
    """Squares numbers. Dies at `deadly` ones: the first `times` times, which files in a folder count."""

    folder: Path
    deadly: tuple[int, ...] = ()
    times: int = 10**9
    ahead: bool = False

    def run(self, turbo: Any, pieces: Iterable[int], progress: object) -> Iterator[tuple[int, str]]:
        held: list[int] = []
        for piece in pieces:
            if piece < 0:
                raise ValueError(f"{piece} is negative")
            counter = self.folder / f"{piece}-{time.monotonic_ns()}"
            if piece in self.deadly and len(list(self.folder.glob(f"{piece}-*"))) < self.times:
                counter.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            held.append(piece)
            if len(held) > self.ahead:
                yield held.pop(0) ** 2, turbo
        for piece in held:
            yield piece**2, turbo


@dataclass(frozen=True)
class Crowd:
    """A stand-in for a model, of which nothing fits on these devices, which other processes fill."""

    devices: tuple[str, ...]

    def __call__(self, device: str) -> Any:
        from esm_turbo.parallel import worker

        worker.filled_by_others = lambda name: "others fill it" if name in self.devices else None
        return None if device in self.devices else device


@dataclass(frozen=True)
class Raises(Squares):
    """Raises an error at deadly pieces, which is made in the worker."""

    error: Callable[[], Exception] = ValueError

    def run(self, turbo: Any, pieces: Iterable[int], progress: object) -> Iterator[tuple[int, str]]:
        for piece in pieces:
            if piece in self.deadly:
                raise self.error()
            yield (-1 if turbo is None else piece**2), str(turbo)


@dataclass(frozen=True)
class HalfAnAnswer(Squares):
    """Dies while it sends its first result."""

    def run(self, turbo: Any, pieces: Iterable[int], progress: object) -> Iterator[tuple[int, str]]:
        from multiprocessing.connection import Connection

        died = self.folder / "died"

        def send_half(connection: Connection, content: bytes, *_: Any) -> None:
            died.touch()
            os.write(connection.fileno(), bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        if not died.exists():
            Connection._send = send_half  # type: ignore[attr-defined]
        yield from super().run(turbo, pieces, progress)


class Echo(Failing):
    """Returns pieces of text as they are, while a thread logs."""

    def run(self, turbo: Any, pieces: Iterable[str], progress: object) -> Iterator[str]:
        done = threading.Event()

        def log() -> None:
            while not done.is_set():
                logging.getLogger("esm_turbo").warning("a context is damaged")

        thread = threading.Thread(target=log)
        thread.start()
        try:
            for piece in pieces:
                # Long enough for the next piece to be on its way.
                done.wait(0.05)
                yield piece
        finally:
            done.set()
            thread.join()


class Pids(Failing):
    """Waits so many seconds, and returns the number of the process."""

    def run(self, turbo: Any, pieces: Iterable[float], progress: object) -> Iterator[int]:
        for piece in pieces:
            time.sleep(piece)
            yield os.getpid()
