"""Reading ahead from one run of rows to the next, as from one piece of a screen to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

import torch

from esm_turbo.model.memory import available_bytes

ResultT = TypeVar("ResultT")


class Ahead:
    """Lets runs of rows that follow each other read contexts across their ends, in one thread, one wave ahead.

    A context manager: at its end, what has not begun is not read any more, and the thread has ended.

    Args:
        device: of the model.

    Attributes:
        free: bytes of memory that were free before any contexts were read; None if that is not known.
        readers: the thread.
    """

    def __init__(self, device: torch.device) -> None:
        # Once: the contexts of one run must not change how those of the next are divided into waves.
        self.free = available_bytes(device)
        self.readers = ThreadPoolExecutor(1)
        self._calls: Iterator[Callable[[], Any]] = iter(())
        self._begun: Future[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.readers.shutdown(cancel_futures=True)

    def in_turn(self, calls: Iterable[Callable[[], ResultT]]) -> Iterator[ResultT]:
        """Make calls, and yield what they return.

        Args:
            calls: begin runs of rows by `waves.predict_rows`. Each is taken and made when the run before it comes to
                its last wave, or at the latest when that has ended. What a call raises is raised when its turn comes.
        """
        self._calls = iter(calls)
        while True:
            self.begin_next()
            if self._begun is None:
                return
            begun, self._begun = self._begun, None
            yield begun.result()

    def begin_next(self) -> None:
        """Make the next call, unless that was done."""
        if self._begun is not None:
            return
        begun: Future[Any] = Future()
        try:
            call = next(self._calls, None)
            if call is None:
                return
            begun.set_result(call())
        except Exception as error:
            begun.set_exception(error)
        self._begun = begun
