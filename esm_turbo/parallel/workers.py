"""Several processes with a model each, on devices of this machine, that share the pieces of a run."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Self

from esm_turbo.parallel import worker
from esm_turbo.parallel.pool import NoWorkersError, Pool, ProcessDied, Slot
from esm_turbo.parallel.worker import LoadModel

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

__all__ = ["NoWorkersError", "Workers"]


class Workers(Pool):
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
        self.threads = threads
        content = pickle.dumps(load)
        super().__init__([_ProcessSlot(name, content, threads) for name in devices], "a worker")

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


class _ProcessSlot(Slot):
    """A pool of one process, made again when it breaks.

    Args:
        device: of the model.
        load: pickled; loads the model.
        threads: of PyTorch on a CPU.
    """

    def __init__(self, device: str, load: bytes, threads: int) -> None:
        super().__init__(device)
        self._load, self._threads = load, threads
        self._pool: ProcessPoolExecutor | None = None
        self._process: BaseProcess | None = None

    def start(self) -> Future[bytes]:
        context = multiprocessing.get_context("spawn")
        theirs, ours = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, context, worker.begin, (theirs, self.device, self._threads))
        call = self._pool.submit(worker.load)
        [self._process] = self._pool._processes.values()
        # Else a process that is killed while it sends a result would leave its reader waiting.
        self._pool._result_queue._writer.close()  # type: ignore[attr-defined]
        # What loads the model may be large: as an argument it would be waited for by one device after the other, and
        # for ever if its process dies first.
        theirs.close()
        threading.Thread(target=_send, args=(ours, self._load), daemon=True).start()
        return call

    def submit(self, task: bytes, pieces: bytes) -> Future[bytes]:
        assert self._pool is not None
        try:
            return self._pool.submit(worker.run, task, pieces)
        except BrokenProcessPool as error:
            # It died between two calls.
            broken: Future[bytes] = Future()
            broken.set_exception(error)
            return broken

    def answer(self, call: Future[bytes]) -> bytes:
        try:
            return call.result()
        except BrokenProcessPool as error:
            assert self._pool is not None and self._process is not None
            self._process.kill()
            self._pool.shutdown()
            raise ProcessDied(_cause(self._process.exitcode)) from error

    def kill(self) -> None:
        if self._pool is not None and self._process is not None:
            # Not SIGTERM, which a process in a system call of a driver may not get.
            self._process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = self._process = None


def _send(connection: Connection, content: bytes) -> None:
    with connection, contextlib.suppress(OSError):
        connection.send_bytes(content)


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
