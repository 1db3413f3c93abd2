"""A worker: the process that loads the model on one device and runs pieces until nobody sends any.

Messages are pickled to bytes before they are sent, so that a tensor is whole once it has arrived, even if its sender
dies at once. PyTorch is imported with the model, after the number of its threads is set.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from esm_turbo.tasks.common.pieces import Task
from esm_turbo.tasks.common.progress import silent

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

LoadModel = Callable[[str], "ContextModel"]
"""Loads the model on the device of that name; can be pickled."""

# Part of a device's memory that other processes hold when it counts as filled by them.
_FILLED = 0.25
# Contexts are read in threads, which may warn of a damaged one while a result is sent.
_sending = threading.Lock()


@dataclass(frozen=True)
class NewWork:
    """From here on, pieces are of this work."""

    work: Task[Any, Any]


@dataclass(frozen=True)
class Piece:
    """A piece to run."""

    number: int
    content: Any


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""


@dataclass(frozen=True)
class Unusable:
    """The device cannot be used, or no longer; the process ends."""

    reason: str


@dataclass(frozen=True)
class Done:
    """The result of a piece."""

    number: int
    result: Any


@dataclass(frozen=True)
class Raised:
    """A piece raised an error that no other process would avoid."""

    number: int
    error: BaseException


@dataclass(frozen=True)
class Warned:
    """A warning or a log message, for the user."""

    message: str
    category: type[Warning] | None


def main(connection: Connection, device: str, threads: int) -> None:
    """Run a worker.

    Args:
        connection: to the process that hands out the pieces; a `LoadModel` is the first that it sends.
        device: the device to use.
        threads: of PyTorch on a CPU.
    """
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    if (torch := sys.modules.get("torch")) is not None:
        # The program that started this process imports it, and did so again here.
        torch.set_num_threads(threads)
    _relay_warnings(connection)
    try:
        load = connection.recv_bytes()
    except EOFError:
        # Nobody is left to load it for.
        return
    try:
        turbo: ContextModel = pickle.loads(load)(device)
    except Exception as error:
        send(connection, Unusable(_reason(error, device)))
        return
    try:
        send(connection, Ready())
        serve(connection, turbo, device)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Nobody waits for results any more.
        pass


def serve(connection: Connection, turbo: ContextModel, device: str) -> None:
    """Run pieces until the connection is closed.

    Raises:
        EOFError: it was closed.
    """
    work: Task[Any, Any] | None = None
    taken: deque[int] = deque()
    left: deque[NewWork] = deque()
    inbox = _Inbox(connection)

    def incoming(piece: Piece) -> Iterator[Any]:
        """The pieces that arrive, this one first; ends where a work that looks ahead would wait in vain."""
        while True:
            taken.append(piece.number)
            yield piece.content
            if taken and inbox.is_empty():
                return
            message = inbox.receive()
            if isinstance(message, NewWork):
                left.append(message)
                return
            piece = message

    while True:
        message = left.popleft() if left else inbox.receive()
        if isinstance(message, NewWork):
            work = message.work
            continue
        assert work is not None
        try:
            for result in work.run(turbo, incoming(message), silent):
                filled = filled_by_others(device) if work.has_failed(result) else None
                if filled is not None:
                    send(connection, Unusable(filled))
                    return
                send(connection, Done(taken.popleft(), result))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            send(connection, Raised(taken[0], portable(error)))
            taken.clear()


class _Inbox:
    """Messages that were sent to this process, in their order.

    A thread takes them off the connection at once. Otherwise whoever sends a large piece would wait until this process
    has computed the one before, and for ever if that has a large result: neither would read what the other sends.

    Args:
        connection: where they arrive.
    """

    def __init__(self, connection: Connection) -> None:
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: Connection) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._messages.put(connection.recv_bytes())
        finally:
            # Whatever stopped it, such as too little memory for a message: nothing arrives any more.
            self._messages.put(None)

    def is_empty(self) -> bool:
        """Whether `receive` would wait."""
        return self._messages.empty()

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError: no more can arrive.
        """
        message = self._messages.get()
        if message is None:
            # Nor is there another one, if somebody asks again.
            self._messages.put(None)
            raise EOFError
        return pickle.loads(message)


def send(connection: Connection, message: object) -> None:
    """Send a message, by value; whole, whatever other threads of this process send."""
    content = pickle.dumps(message)
    with _sending:
        connection.send_bytes(content)


def receive(connection: Connection) -> Any:
    """Wait for a message.

    Raises:
        EOFError: the other side is gone.
    """
    return pickle.loads(connection.recv_bytes())


def filled_by_others(device: str) -> str | None:
    """What other processes hold of a device's memory, if that is much of it; None elsewhere and on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    from esm_turbo.tasks.common.memory import size_text

    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others < _FILLED * total:
        return None
    return f"other processes hold {size_text(others)} of its {size_text(total)} of memory"


def _reason(error: Exception, device: str) -> str:
    from esm_turbo.model.memory import is_out_of_memory

    if is_out_of_memory(error):
        filled = filled_by_others(device)
        return "the model does not fit into its memory" + ("" if filled is None else f": {filled}")
    return str(error) or type(error).__name__


def portable(error: Exception) -> Exception:
    """An error that can be sent, with this process's traceback as a note.

    Some classes cannot be made again from their arguments. Such an error becomes one of the built-in class by which
    callers tell what it is, or a RuntimeError.
    """
    note = "in the worker:\n" + "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        known = next((kind for kind in (ValueError, ImportError, OSError) if isinstance(error, kind)), None)
        error = RuntimeError(f"{type(error).__name__}: {error}") if known is None else known(str(error))
    error.add_note(note)
    return error


def _relay_warnings(connection: Connection) -> None:
    """Send the warnings and log messages of this package to whoever shows them."""

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        send(connection, Warned(str(message), category))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            send(connection, Warned(record.getMessage(), None))

    warnings.showwarning = show  # type: ignore[assignment]
    log = logging.getLogger("esm_turbo")
    log.addHandler(Handler(logging.WARNING))
    log.propagate = False
