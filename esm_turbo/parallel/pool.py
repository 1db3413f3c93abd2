"""The loop that shares the pieces of a run among processes, and runs those again whose process has died."""

from __future__ import annotations

import logging
import pickle
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from esm_turbo.parallel.worker import Answer
from esm_turbo.tasks.common.pieces import Runner, Task
from esm_turbo.tasks.common.progress import Progress

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")

# Deaths after which a piece counts as failed, and deaths in a row after which a device is given up.
_DEATHS = 3
# Pieces of one call at most, among which a task reads ahead, and calls that every process makes at least.
_MOST_PIECES, _CALLS = 4, 4
_log = logging.getLogger("esm_turbo")


class NoWorkersError(RuntimeError):
    """No device is left on which pieces can run."""


class WorkerProcess(ABC):
    """A process with a `PieceWorker`."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Future[bytes]:
        """Call a method of the worker after those that were called before; returns its pickled `Answer`."""

    @abstractmethod
    def has_died_of(self, error: Exception) -> bool:
        """True if a call raised an error because the process has ended."""

    @abstractmethod
    def kill(self, error: Exception | None = None) -> str:
        """End the process; returns in words why it had ended, by the error of its last call."""


@dataclass(eq=False)
class _Slot:
    """A device, the process on it, the call that it has not answered, and how often it died since it last did."""

    device: str
    process: WorkerProcess | None = None
    call: Future[bytes] | None = None
    pieces: list[int] = field(default_factory=list)
    deaths: int = 0

    def end(self, error: Exception | None = None) -> str:
        """End the process, if there is one, and forget what it ran; returns why it had ended."""
        reason = "" if self.process is None else self.process.kill(error)
        self.process, self.call, self.pieces = None, None, []
        return reason


class _Run(Generic[PieceT, ResultT]):
    """Pieces that wait, the largest first, and how often processes have died of each."""

    def __init__(self, task: Task[PieceT, ResultT], pieces: Sequence[PieceT], units: Sequence[int]) -> None:
        self.task, self.pieces, self.content = task, pieces, pickle.dumps(task)
        self.waiting = deque(sorted(range(len(pieces)), key=lambda index: -units[index]))
        self.deaths: Counter[int] = Counter()

    def take(self, most: int) -> list[int]:
        """Numbers of the pieces of the next call, of which there are some."""
        taken = [self.waiting.popleft()]
        # A piece with which a process has died is alone the next time, so that no other is taken for the cause.
        while len(taken) < most and not any(number in self.deaths for number in (self.waiting[0], *taken)):
            taken.append(self.waiting.popleft())
        return taken

    def lose(self, numbers: Sequence[int], cause: str) -> list[tuple[int, ResultT]]:
        """Put the pieces of a process that has died first; returns the results of those that are not run again."""
        self.deaths.update(numbers)
        self.waiting.extendleft(number for number in reversed(numbers) if self.deaths[number] < _DEATHS)
        reason = f"its process died {_DEATHS} times ({cause})"
        given_up = [number for number in numbers if self.deaths[number] >= _DEATHS]
        return [(number, self.task.failed(self.pieces[number], reason)) for number in given_up]


class Pool(Runner):
    """Processes that share the pieces of runs. They start when there is something to do.

    Args:
        devices: of the processes, at least one.
        start: starts a process that will hold its model on a device.
        load: what its method `load` is given.
        noun: name of one of them in messages, with its article.
    """

    def __init__(self, devices: Sequence[str], start: Callable[[str], WorkerProcess], load: Any, noun: str) -> None:
        self.devices = " ".join(dict.fromkeys(devices))
        self._slots = [_Slot(device) for device in devices]
        self._start, self._load, self._noun = start, load, noun
        self._told: set[str] = set()
        self._busy = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for slot in self._slots:
            slot.end()

    def results(
        self, task: Task[PieceT, ResultT], pieces: Sequence[PieceT], units: Sequence[int], progress: Progress
    ) -> Iterator[tuple[int, ResultT]]:
        """See `Runner.results`; the largest pieces are begun first.

        A piece whose process has died three times counts as failed.

        Raises:
            NoWorkersError: no device can be used, or is left.
            RuntimeError: another call has not ended, in this thread or another one.
            Exception: what a piece raised.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{self._noun} runs pieces of another call, which has not ended: let it end first, or give this call"
                " workers of its own"
            )
        run = _Run(task, pieces, units)
        try:
            while run.waiting or any(slot.pieces for slot in self._slots):
                self._hand_out(run)
                called = {slot.call: slot for slot in self._slots if slot.call is not None}
                if not called:
                    raise NoWorkersError(f"no device is left of {self.devices}; the lines above say why")
                finished: list[tuple[int, ResultT]] = []
                failure = None
                for call in wait(called, return_when=FIRST_COMPLETED).done:
                    own, error = self._collect(called[call], call, run)
                    finished += own
                    failure = failure or error
                if failure is None:
                    # Before the results are used, which takes time.
                    self._hand_out(run)
                yield from finished
                if failure is not None:
                    raise failure
        except BaseException:
            # Processes still compute pieces that nobody waits for.
            self.close()
            raise
        finally:
            self._busy.release()

    def _hand_out(self, run: _Run[Any, Any]) -> None:
        """Start the processes that are missing, and give pieces to each that has none."""
        for slot in self._slots:
            if not run.waiting or slot.call is not None:
                continue
            if slot.process is None:
                slot.process = self._start(slot.device)
                slot.call = slot.process.call("load", self._load)
                continue
            slot.pieces = run.take(min(_MOST_PIECES, max(1, len(run.waiting) // (_CALLS * len(self._slots)))))
            content = pickle.dumps([run.pieces[number] for number in slot.pieces])
            slot.call = slot.process.call("run", run.content, content)

    def _collect(
        self, slot: _Slot, call: Future[bytes], run: _Run[Any, ResultT]
    ) -> tuple[list[tuple[int, ResultT]], Exception | None]:
        """The results of a finished call, and the error that ended it, which no other process would avoid."""
        assert slot.process is not None
        try:
            answer: Answer = pickle.loads(call.result())
        except Exception as error:
            if not slot.process.has_died_of(error):
                raise
            return self._replace(slot, error, run), None
        self._tell(answer)
        numbers, slot.call, slot.pieces, slot.deaths = slot.pieces, None, [], 0
        if answer.unusable is not None:
            _log.warning("%s cannot be used: %s; the others go on without it", slot.device, answer.unusable)
            run.waiting.extendleft(reversed(numbers[len(answer.results) :]))
            self._give_up(slot)
        return list(zip(numbers, answer.results, strict=False)), answer.error

    def _replace(self, slot: _Slot, error: Exception, run: _Run[Any, ResultT]) -> list[tuple[int, ResultT]]:
        """Prepare a slot whose process has died for another; returns the results of what is not run again."""
        lost, cause = slot.pieces, slot.end(error)
        slot.deaths += 1
        gives_up = slot.deaths >= _DEATHS
        what = "the others go on without it" if gives_up else "it is replaced"
        _log.warning("%s on %s died (%s); %s", self._noun, slot.device, cause, what)
        if gives_up:
            self._give_up(slot)
        return run.lose(lost, cause)

    def _give_up(self, slot: _Slot) -> None:
        """Leave a device to others."""
        slot.end()
        self._slots.remove(slot)

    def _tell(self, answer: Answer) -> None:
        """Show the warnings of a process, each once."""
        for text, category in answer.told:
            if text not in self._told:
                self._told.add(text)
                if category is None:
                    _log.warning("%s", text)
                else:
                    warnings.warn(text, category, stacklevel=4)
