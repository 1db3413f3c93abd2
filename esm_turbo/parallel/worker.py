"""The process that holds the model on one device and runs pieces, of a process pool or of Ray.

Arguments and results are pickled to bytes here, so that tensors travel by value: by PyTorch's own way they would lie in
shared memory that ends with the process. PyTorch is imported with the model, after the number of its threads is set.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from esm_turbo.tasks.common.pieces import Task
from esm_turbo.tasks.common.progress import silent

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

LoadModel = Callable[[str], "ContextModel"]
"""Loads the model on the device of that name; can be pickled."""

# Part of a device's memory that other processes hold when it counts as filled by them.
_FILLED = 0.25


@dataclass
class Answer:
    """Results of a call.

    Attributes:
        results: of the pieces, in their order; fewer if one raised an error or the device cannot be used.
        error: that a piece raised and no other process would avoid.
        unusable: why the device cannot be used, or no longer.
        told: warnings with their category, and log messages with None, for the user.
    """

    results: list[Any] = field(default_factory=list)
    error: Exception | None = None
    unusable: str | None = None
    told: list[tuple[str, type[Warning] | None]] = field(default_factory=list)


class PieceWorker:
    """Holds the model of a process.

    Args:
        device: where the model lies.
        threads: of PyTorch on a CPU.
    """

    def __init__(self, device: str, threads: int) -> None:
        self._device = device
        self._turbo: ContextModel
        self._told: list[tuple[str, type[Warning] | None]] = []
        # A task keeps what it has opened and read, such as the contexts of a store.
        self._task: Callable[[bytes], Task[Any, Any]] = functools.lru_cache(1)(pickle.loads)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(threads)
        if (torch := sys.modules.get("torch")) is not None:
            # The program that started this process imports it, and did so again here.
            torch.set_num_threads(threads)
        self._keep_warnings()

    def load(self, load: bytes) -> bytes:
        """Load the model with a pickled `LoadModel`; returns a pickled `Answer`."""
        answer = Answer()
        try:
            self._turbo = pickle.loads(load)(self._device)
        except Exception as error:
            answer.unusable = _reason(error, self._device)
        return self._pickled(answer)

    def run(self, task: bytes, pieces: bytes) -> bytes:
        """Run a list of pieces of a task; returns a pickled `Answer`."""
        answer = Answer()
        try:
            work = self._task(task)
            for result in work.run(self._turbo, pickle.loads(pieces), silent):
                answer.unusable = filled_by_others(self._device) if work.has_failed(result) else None
                if answer.unusable is not None:
                    break
                answer.results.append(result)
        except Exception as error:
            answer.error = portable(error)
        return self._pickled(answer)

    def _pickled(self, answer: Answer) -> bytes:
        answer.told, self._told[:] = list(self._told), []
        return pickle.dumps(answer)

    def _keep_warnings(self) -> None:
        """Keep the warnings and log messages of this package for the next answer."""
        told = self._told

        def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
            told.append((str(message), category))

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                told.append((record.getMessage(), None))

        warnings.showwarning = show  # type: ignore[assignment]
        log = logging.getLogger("esm_turbo")
        log.addHandler(Handler(logging.WARNING))
        log.propagate = False


_worker: PieceWorker


def begin(device: str, threads: int) -> None:
    """Begin a process of a pool; the arguments are those of `PieceWorker`."""
    global _worker
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = PieceWorker(device, threads)


def call(method: str, *arguments: bytes) -> bytes:
    """Call a method of the `PieceWorker` in a process of a pool."""
    answer: bytes = getattr(_worker, method)(*arguments)
    return answer


def _end_with_parent() -> None:
    """End this process when the one that started it is killed, as nobody else would."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def filled_by_others(device: str) -> str | None:
    """Memory of a device that other processes hold, if that is a large part; None otherwise and on a CPU."""
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
