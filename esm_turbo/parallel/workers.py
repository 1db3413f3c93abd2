"""Several processes with a model each, on devices of this machine, that share the pieces of a run."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import pickle
import signal
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from esm_turbo.parallel import worker
from esm_turbo.parallel.worker import Done, LoadModel, NewWork, Piece, Raised, Ready, Unusable, Warned, receive
from esm_turbo.tasks.common.pieces import PieceProgress, Task
from esm_turbo.tasks.common.progress import Progress

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")

# Deaths after which a piece counts as failed, and deaths in a row after which a device is given up.
_DEATHS = 3
_log = logging.getLogger("esm_turbo")


class NoWorkersError(RuntimeError):
    """No device is left on which pieces can run."""


class Workers:
    """Processes that share the pieces of runs, a `Runner`.

    A process that dies is replaced, and its pieces are run again. A device that cannot be used, or that other processes
    fill, is reported and left to them, and the others go on.

    Args:
        load: loads the model on a device, in each process.
        devices: of the processes, such as `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`.
        threads: of PyTorch in a process, on a CPU.

    Raises:
        ValueError: there are no devices.
    """

    shares_files = True

    def __init__(self, load: LoadModel, devices: Sequence[str], *, threads: int = 1) -> None:
        if not devices:
            raise ValueError("`devices` must name at least one device")
        self.devices = " ".join(dict.fromkeys(devices))
        self.threads = threads
        self._load = pickle.dumps(load)
        self._slots = [_Slot(name) for name in devices]
        self._told: set[str] = set()

    @classmethod
    def of(cls, turbo: ContextModel, devices: Sequence[str], *, threads: int = 1) -> Self:
        """Workers with copies of a model, which is sent to them through host memory.

        Args:
            turbo: the model, on one device.
            devices: see above, as are `threads`.

        Raises:
            ValueError: there are no devices, or the model lies on several.
        """
        if turbo.model.base_model.is_spread:
            raise ValueError("the model lies on several devices: its copies would, too; load it on one, device='cpu'")
        buffer = io.BytesIO()
        _HostPickler(buffer).dump(turbo)
        return cls(_Copies(buffer.getvalue()), devices, threads=threads)

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
        work: Task[PieceT, ResultT],
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
        left = len(pieces)
        try:
            for slot in self._slots if left else ():
                slot.begin(self._load, self.threads, work)
            while left:
                self._hand_out(pieces, waiting, deaths)
                for slot, message in self._messages():
                    match message:
                        case Done(number, result):
                            slot.pieces.remove(number)
                            slot.deaths = 0
                            left -= 1
                            yield number, result
                            counter.finish(number)
                        case Raised(_, error):
                            raise error
                        case Unusable(reason):
                            _log.warning("%s cannot be used: %s; the others go on without it", slot.device, reason)
                            waiting.extendleft(reversed(slot.pieces))
                            slot.give_up()
                        case Warned(text, category):
                            self._tell(text, category)
                        case Ready():
                            slot.ready = True
                        case _Died(code):
                            lost = list(slot.pieces)
                            for number in reversed(lost):
                                deaths[number] += 1
                                if deaths[number] < _DEATHS:
                                    waiting.appendleft(number)
                            again = slot.restart(self._load, self.threads, work)
                            _log.warning(
                                "a worker on %s died (%s); %s",
                                slot.device,
                                _cause(code),
                                "it is replaced" if again else "the others go on without it",
                            )
                            for number in lost:
                                if deaths[number] >= _DEATHS:
                                    left -= 1
                                    reason = f"its process died {_DEATHS} times ({_cause(code)})"
                                    yield number, work.failed(pieces[number], reason)
                                    counter.finish(number)
        except BaseException:
            # Processes still compute pieces that nobody waits for.
            self.close()
            raise

    def _hand_out(self, pieces: Sequence[Any], waiting: deque[int], deaths: Mapping[int, int]) -> None:
        """Send a piece to each process that has none, and a second one where enough are waiting.

        A piece with which a process has died is alone the next time, so that no other is taken for the cause.
        """
        usable = [slot for slot in self._slots if slot.connection is not None]
        if not usable:
            raise NoWorkersError(f"no device is left of {self.devices}; the lines above say why")
        for most in (1, 2):
            for slot in usable:
                if not (slot.ready and waiting and len(slot.pieces) < most):
                    continue
                suspects = any(number in deaths for number in (waiting[0], *slot.pieces))
                if most == 1 or (len(waiting) > len(usable) and not suspects):
                    number = waiting.popleft()
                    slot.pieces.append(number)
                    slot.send(Piece(number, pieces[number]))

    def _messages(self) -> Iterator[tuple[_Slot, object]]:
        """Wait for messages, at least one."""
        slots = {slot.connection: slot for slot in self._slots if slot.connection is not None}
        for connection in wait(list(slots)):
            slot = slots[connection]  # type: ignore[index]
            try:
                message = receive(slot.connection)  # type: ignore[arg-type]
            except (EOFError, OSError, pickle.UnpicklingError):
                message = _Died(slot.exit_code())
            yield slot, message

    def _tell(self, text: str, category: type[Warning] | None) -> None:
        """Show a warning of a worker, once."""
        if text not in self._told:
            self._told.add(text)
            if category is None:
                _log.warning("%s", text)
            else:
                warnings.warn(text, category, stacklevel=4)


class _HostPickler(pickle.Pickler):
    """Pickles tensors as those of the CPU, and views without what else lies in their storage."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if type(obj) is not torch.Tensor:
            return NotImplemented
        if obj.device.type == "cpu" and obj.untyped_storage().nbytes() == obj.nbytes:
            return NotImplemented
        return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class _Copies:
    """Makes copies of a model on devices.

    Args:
        pickled: the model.
    """

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __call__(self, device: str) -> ContextModel:
        turbo: ContextModel = pickle.loads(self.pickled)
        turbo.model.to(device)
        return turbo


class _Died:
    """A process ended; its exit code, or minus the number of a signal."""

    __match_args__ = ("code",)

    def __init__(self, code: int | None) -> None:
        self.code = code


class _Slot:
    """The process on one device.

    Attributes:
        device: the device.
        connection: to the process; None before it starts and after it was given up.
        ready: whether it has loaded the model.
        pieces: numbers of those that it has been sent, in that order.
        deaths: how often it has died since it last finished a piece.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.connection: Connection | None = None
        self.ready = False
        self.pieces: list[int] = []
        self.deaths = 0
        self._process: SpawnProcess | None = None
        self._given_up = False

    def begin(self, load: bytes, threads: int, work: Task[Any, Any]) -> None:
        """Start the process unless it runs, and tell it the work."""
        if self._given_up:
            return
        if self.connection is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            # What loads the model may be large. As an argument it would never arrive in a process that dies first, and
            # this one would wait for it to be read.
            self._process = context.Process(target=worker.main, args=(other, self.device, threads), daemon=True)
            self._process.start()
            other.close()
            self.ready = False
            self._send_bytes(load)
        self.send(NewWork(work))

    def restart(self, load: bytes, threads: int, work: Task[Any, Any]) -> bool:
        """Replace a process that has died; False if too many have."""
        self.end()
        self.deaths += 1
        if self.deaths >= _DEATHS:
            self._given_up = True
        else:
            self.begin(load, threads, work)
        return not self._given_up

    def send(self, message: object) -> None:
        """Send a message; that its process has died is noticed when the next one is received."""
        self._send_bytes(pickle.dumps(message))

    def _send_bytes(self, message: bytes) -> None:
        assert self.connection is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(message)

    def exit_code(self) -> int | None:
        """Exit code of the process, which has closed its connection."""
        assert self._process is not None
        self._process.join(5)
        return self._process.exitcode

    def give_up(self) -> None:
        """End the process for good."""
        self._given_up = True
        self.end()

    def end(self) -> None:
        """End the process."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._process is not None:
            # Not SIGTERM, which a process in a system call of a driver may not get.
            self._process.kill()
            self._process.join()
            self._process.close()
            self._process = None
        self.ready, self.pieces = False, []


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
