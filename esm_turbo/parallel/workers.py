"""Several processes with a model each, on devices of this machine, that share the pieces of a run.

A piece is computed as in one process, so that whoever computes it, and how many do, results are the same.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from esm_turbo.parallel import worker
from esm_turbo.parallel.pool import NoWorkersError, Pool, WorkerProcess
from esm_turbo.parallel.worker import LoadModel
from esm_turbo.tasks.common.pieces import Runner, Task
from esm_turbo.tasks.common.progress import Progress

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

__all__ = ["NoWorkersError", "Workers"]

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")


class Workers(Pool):
    """Processes that share the pieces of runs.

    A process that dies is replaced, and its pieces are run again. A device that cannot be used, or that other processes
    fill, is reported and left to them, and the others go on.

    Args:
        load: loads the model on a device, in each process.
        devices: of the processes, such as `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`.
        threads: of PyTorch in a process, on a CPU.

    Raises:
        ValueError: there are no devices.
    """

    def __init__(self, load: LoadModel, devices: Sequence[str], *, threads: int = 1) -> None:
        if not devices:
            raise ValueError("`devices` must name at least one device")
        self.threads = threads
        super().__init__(devices, partial(_PoolOfOne, threads=threads), pickle.dumps(load), "a worker")

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
        return cls(partial(_copy, buffer.getvalue()), devices, threads=threads)


Devices = str | Sequence[str] | Workers
"""`all`, names of devices, or processes that run already."""


class DeviceRunner(Runner):
    """Processes with copies of a model that live while pieces are run.

    Args:
        turbo: the model.
        devices: where copies of it run.
    """

    def __init__(self, turbo: ContextModel, devices: str | Sequence[str]) -> None:
        self._turbo, self._given = turbo, devices
        # Of a string, only `all` is allowed.
        self.devices = "cuda" if isinstance(devices, str) else " ".join(devices)

    def results(
        self, task: Task[PieceT, ResultT], pieces: Sequence[PieceT], units: Sequence[int], progress: Progress
    ) -> Iterator[tuple[int, ResultT]]:
        """See `Runner.results`.

        Raises:
            ValueError: no devices are named, or there are none.
        """
        names = self._given
        if names == "all" and not (names := cuda_devices()):
            raise ValueError("devices='all' finds no CUDA device here; on the CPU, name it once for every process")
        if isinstance(names, str):
            raise ValueError(
                f"`devices` must be 'all', a list of names such as ['cuda:0', 'cuda:1'], or Workers, got {names!r}"
            )
        with Workers.of(self._turbo, names) as workers:
            yield from workers.results(task, pieces, units, progress)


def cuda_devices() -> tuple[str, ...]:
    """Names of all CUDA devices of this machine."""
    import torch

    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


class _HostPickler(pickle.Pickler):
    """Pickles tensors as those of the CPU, and views without what else lies in their storage."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if type(obj) is not torch.Tensor:
            return NotImplemented
        if obj.device.type == "cpu" and obj.untyped_storage().nbytes() == obj.nbytes:
            return NotImplemented
        return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _copy(pickled: bytes, device: str) -> ContextModel:
    """Make a copy of a model on a device."""
    turbo: ContextModel = pickle.loads(pickled)
    turbo.model.to(device)
    return turbo


class _PoolOfOne(WorkerProcess):
    """A process pool with one process.

    Args:
        device: of the model.
        threads: of PyTorch on a CPU.
    """

    def __init__(self, device: str, threads: int) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), worker.begin, (device, threads))
        # A first call starts the process.
        self._pool.submit(int)
        [self._process] = self._pool._processes.values()
        # Else a process that is killed while it sends a result would leave its reader waiting.
        self._pool._result_queue._writer.close()  # type: ignore[attr-defined]

    def call(self, method: str, *arguments: Any) -> Future[bytes]:
        try:
            return self._pool.submit(worker.call, method, *arguments)
        except BrokenProcessPool as error:
            # It died between two calls.
            broken: Future[bytes] = Future()
            broken.set_exception(error)
            return broken

    def has_died_of(self, error: Exception) -> bool:
        return isinstance(error, BrokenProcessPool)

    def kill(self, error: Exception | None = None) -> str:
        # Not SIGTERM, which a process in a system call of a driver may not get.
        self._process.kill()
        self._pool.shutdown(cancel_futures=True)
        code = self._process.exitcode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
