"""What a worker does beside computing: it notices that others fill its device, and ends with whoever started it."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from esm_turbo.files.writing import WritingError
from esm_turbo.parallel import worker
from esm_turbo.parallel.ray_actors import _Actor
from esm_turbo.parallel.worker import (
    Done,
    NewWork,
    Piece,
    Raised,
    Unusable,
    filled_by_others,
    main,
    receive,
    send,
    serve,
)


class Halves:
    """Halves even numbers; odd ones fail."""

    def run(self, turbo: Any, pieces: Iterable[int], progress: object) -> Iterator[int | None]:
        for piece in pieces:
            yield None if piece % 2 else piece // 2

    def failed(self, piece: int, reason: str) -> None:
        return None

    def has_failed(self, result: int | None) -> bool:
        return result is None


class Unportable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class UnportableValue(ValueError):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@dataclass(frozen=True)
class Raises(Halves):
    """Raises an error, which is made in the worker."""

    error: Callable[[], Exception]

    def run(self, turbo: Any, pieces: Iterable[int], progress: object) -> Iterator[int | None]:
        for _ in pieces:
            raise self.error()
        yield None


def served(*messages: object) -> list[Any]:
    """The answers of a worker, which ends when nothing else is sent."""
    ours, its = multiprocessing.Pipe()
    answers = []

    def run() -> None:
        with contextlib.suppress(EOFError):
            serve(its, None, "cpu")  # type: ignore[arg-type]
        its.close()

    thread = threading.Thread(target=run)
    thread.start()
    for message in messages:
        send(ours, message)
        if isinstance(message, Piece):
            answers.append(receive(ours))
    ours.close()
    thread.join(30)
    assert not thread.is_alive()
    return answers


def test_pieces_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(NewWork(Halves()), Piece(3, 4), Piece(1, 5)) == [Done(3, 2), Done(1, None)]
    # A record fails that would fit on an empty device.
    monkeypatch.setattr(worker, "filled_by_others", lambda device: f"others hold {device}")
    assert served(NewWork(Halves()), Piece(3, 4), Piece(1, 5)) == [Done(3, 2), Unusable("others hold cpu")]


def test_errors_are_sent() -> None:
    first, second = served(NewWork(Halves()), Piece(3, "x"), NewWork(Halves()), Piece(4, 4))
    assert isinstance(first, Raised) and isinstance(first.error, TypeError) and first.number == 3
    [note] = first.error.__notes__
    assert note.startswith("in the worker:\nTraceback") and "in serve" in note
    assert second == Done(4, 2)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (partial(Unportable, 1, 2), RuntimeError, "Unportable: 1 and 2"),
        (partial(UnportableValue, 1, 2), ValueError, "1 and 2"),
        (partial(WritingError, "a.pt", "full", 28), OSError, "a.pt: cannot be written (full)"),
        (partial(KeyError, "a"), KeyError, "'a'"),
    ],
)
def test_errors_are_of_the_same_kind_once_they_are_sent(
    make: Callable[[], Exception], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command reports those of a full disk, for example, in a line of their own."""
    [sent] = served(NewWork(Raises(make)), Piece(3, 4))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    actor = _Actor(pickle.dumps(str), pickle.dumps(Raises(make)), "cpu", 1)
    [result] = actor({"number": [3], "piece": [pickle.dumps(4)]})["result"]
    for error in (sent.error, pickle.loads(result).error):
        assert type(error) is kind and str(error) == message
        assert error.__notes__[0].startswith("in the worker:\nTraceback")


def test_a_message_that_cannot_be_read_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    class Large:
        def recv_bytes(self) -> bytes:
            raise MemoryError

    ended: list[bool] = []

    def run() -> None:
        with pytest.raises(EOFError):
            serve(Large(), None, "cpu")  # type: ignore[arg-type]
        ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert ended


def test_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled_by_others("cpu") is None
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * 2**30)
    for free, expected in ((80, None), (20, "other processes hold 70.0 GiB of its 100.0 GiB of memory")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 100 * 2**30))
        assert filled_by_others("cuda:1") == expected


class Threads:
    """In place of a model: the number of PyTorch's threads in the worker, as the reason why it cannot be loaded."""

    def __call__(self, device: str) -> Any:
        import torch

        raise RuntimeError(str(torch.get_num_threads()))


def start_with_torch(connection: Connection, threads: int) -> None:
    import torch

    torch.set_num_threads(3)
    main(connection, "cpu", threads)


def test_threads_are_those_asked_for_though_torch_was_imported_before() -> None:
    """As in a process whose starting program imports it at its head."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=start_with_torch, args=(its, 2))
    process.start()
    its.close()
    send(ours, Threads())
    assert receive(ours) == Unusable("2")
    process.join(60)
    assert process.exitcode == 0
