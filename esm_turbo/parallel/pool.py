"""The loop that shares the pieces of a run among processes, and runs those again whose process has died."""

from __future__ import annotations

import logging
import pickle
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar

from esm_turbo.parallel.worker import Answer
from esm_turbo.tasks.common.pieces import PieceProgress, Task
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


class ProcessDied(Exception):
    """A process ended during a call; the message says of what."""


class Slot(ABC):
    """A device with a process that holds the model, which can be replaced.

    Attributes:
        device: name of the device.
        call: that the process has not answered.
        pieces: numbers of those that it runs.
        started: whether there is a process.
        deaths: how often it has died since it last finished a call.
        given_up: whether the device is left to others.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.call: Future[bytes] | None = None
        self.pieces: list[int] = []
        self.started = False
        self.deaths = 0
        self.given_up = False

    @abstractmethod
    def start(self) -> Future[bytes]:
        """Start a process and let it load the model; returns a pickled `Answer`."""

    @abstractmethod
    def submit(self, task: bytes, pieces: bytes) -> Future[bytes]:
        """Let the process run pieces, see `PieceWorker.run`."""

    @abstractmethod
    def answer(self, call: Future[bytes]) -> bytes:
        """The result of a finished call.

        Raises:
            ProcessDied: nothing, since its process has ended.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the process, if there is one."""

    def end(self) -> None:
        """End the process, and forget what it ran."""
        self.kill()
        self.call, self.pieces, self.started = None, [], False


class Pool:
    """Processes that share the pieces of runs, a `Runner`.

    Args:
        slots: of the processes, at least one.
        process: name of one of them in messages, with its article.
    """

    def __init__(self, slots: Sequence[Slot], process: str) -> None:
        self.devices = " ".join(dict.fromkeys(slot.device for slot in slots))
        self._slots, self._process = slots, process
        self._told: set[str] = set()

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

    def run(
        self,
        task: Task[PieceT, ResultT],
        pieces: Sequence[PieceT],
        *,
        stage: str,
        units: Sequence[int],
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, ResultT]]:
        """Yield the result of every piece once, as they arrive; the largest pieces are begun first.

        A piece whose process has died three times counts as failed.

        Raises:
            NoWorkersError: no device can be used, or is left.
            Exception: what a piece raised.
        """
        counter = PieceProgress(stage, units, progress)
        waiting = deque(sorted(range(len(pieces)), key=lambda index: -units[index]))
        deaths: Counter[int] = Counter()
        content, left = pickle.dumps(task), len(pieces)
        try:
            while left:
                self._hand_out(content, pieces, waiting, deaths)
                calls = [slot.call for slot in self._slots if slot.call is not None]
                if not calls:
                    raise NoWorkersError(f"no device is left of {self.devices}; the lines above say why")
                done = wait(calls, return_when=FIRST_COMPLETED).done
                finished: list[tuple[int, ResultT]] = []
                error = None
                for slot in self._slots:
                    if slot.call not in done:
                        continue
                    try:
                        answer: Answer = pickle.loads(slot.answer(slot.call))
                    except ProcessDied as death:
                        failed = self._replace(slot, str(death), waiting, deaths)
                        reason = f"its process died {_DEATHS} times ({death})"
                        finished += [(number, task.failed(pieces[number], reason)) for number in failed]
                        continue
                    self._tell(answer)
                    numbers, slot.call, slot.pieces, slot.deaths = slot.pieces, None, [], 0
                    finished += zip(numbers, answer.results, strict=False)
                    error = error or answer.error
                    if answer.unusable is not None:
                        _log.warning("%s cannot be used: %s; the others go on without it", slot.device, answer.unusable)
                        waiting.extendleft(reversed(numbers[len(answer.results) :]))
                        slot.given_up = True
                        slot.end()
                if error is None:
                    # Before the results are used, which takes time.
                    self._hand_out(content, pieces, waiting, deaths)
                for number, result in finished:
                    yield number, result
                    left -= 1
                    counter.finish(number)
                if error is not None:
                    raise error
        except BaseException:
            # Processes still compute pieces that nobody waits for.
            self.close()
            raise

    def _hand_out(self, task: bytes, pieces: Sequence[Any], waiting: deque[int], deaths: Mapping[int, int]) -> None:
        """Start the processes that are missing, and give pieces to each that has none."""
        usable = [slot for slot in self._slots if not slot.given_up]
        for slot in usable:
            if not waiting or slot.call is not None:
                continue
            if not slot.started:
                slot.started, slot.call = True, slot.start()
                continue
            most = min(_MOST_PIECES, max(1, len(waiting) // (_CALLS * len(usable))))
            slot.pieces.append(waiting.popleft())
            # A piece with which a process has died is alone the next time, so that no other is taken for the cause.
            while len(slot.pieces) < most and not any(number in deaths for number in (waiting[0], *slot.pieces)):
                slot.pieces.append(waiting.popleft())
            slot.call = slot.submit(task, pickle.dumps([pieces[number] for number in slot.pieces]))

    def _replace(self, slot: Slot, cause: str, waiting: deque[int], deaths: Counter[int]) -> list[int]:
        """Prepare a slot whose process has died for another; returns the pieces that are not run again."""
        lost = slot.pieces
        deaths.update(lost)
        waiting.extendleft(number for number in reversed(lost) if deaths[number] < _DEATHS)
        slot.end()
        slot.deaths += 1
        slot.given_up = slot.deaths >= _DEATHS
        what = "the others go on without it" if slot.given_up else "it is replaced"
        _log.warning("%s on %s died (%s); %s", self._process, slot.device, cause, what)
        return [number for number in lost if deaths[number] >= _DEATHS]

    def _tell(self, answer: Answer) -> None:
        """Show the warnings of a process, each once."""
        for text, category in answer.told:
            if text not in self._told:
                self._told.add(text)
                if category is None:
                    _log.warning("%s", text)
                else:
                    warnings.warn(text, category, stacklevel=4)
