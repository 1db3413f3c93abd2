"""Actors on a Ray cluster, each with a model of its own, that share the pieces of a run.

Results come back to the process that started the run, and that process writes them: the cluster needs no shared folder,
except for stores.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from esm_turbo.files.extras import install_hint
from esm_turbo.parallel.pool import Pool, ProcessDied, Slot
from esm_turbo.parallel.worker import LoadModel, PieceWorker


def import_ray() -> Any:
    """The package ray.

    Raises:
        ImportError: it is missing.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"--engine ray needs Ray: {install_hint('ray')}") from error
    return ray


class RayActors(Pool):
    """Actors that share the pieces of runs, a `Runner`.

    An actor that dies is replaced, on any node, and its pieces are run again.

    Args:
        load: loads the model, in each actor.
        count: number of actors.
        device: of each, `cuda` or `cpu`; Ray gives every actor a GPU of its own.
        threads: of PyTorch in an actor on a CPU, which Ray reserves as cores.
        address: of the cluster, such as `auto`; None starts one on this machine, for the time of the run.

    Raises:
        ImportError: Ray is missing.
        ConnectionError: there is no cluster at the address.
    """

    shares_files = False

    def __init__(
        self, load: LoadModel, count: int, *, device: str = "cpu", threads: int = 1, address: str | None = None
    ) -> None:
        ray = import_ray()
        self._initialized = contextlib.ExitStack()
        if not ray.is_initialized():
            # Its actors must find what this process finds; a cluster has its own.
            local = {"num_cpus": max(count * threads, 1) + 1, "include_dashboard": False} if address is None else {}
            self._initialized.enter_context(_initialized(ray, address=address, **local))
        on_gpu = device.startswith("cuda")
        actor = ray.remote(PieceWorker).options(num_cpus=0 if on_gpu else threads, num_gpus=1 if on_gpu else 0)
        content = ray.put(pickle.dumps(load))
        super().__init__([_ActorSlot(ray, actor, device, content, threads) for _ in range(count)], "an actor")

    def close(self) -> None:
        """Leave the cluster; one that was started for the run is ended."""
        super().close()
        self._initialized.close()


class _ActorSlot(Slot):
    """An actor, and another one when it has died.

    Args:
        ray: the package.
        actor: makes one.
        device: of the model.
        load: reference to what loads it, pickled.
        threads: of PyTorch on a CPU.
    """

    def __init__(self, ray: Any, actor: Any, device: str, load: Any, threads: int) -> None:
        super().__init__(device)
        self._ray, self._make, self._load, self._threads = ray, actor, load, threads
        self._actor: Any = None

    def start(self) -> Future[bytes]:
        self._actor = self._make.remote(self.device, self._threads)
        return self._future(self._actor.load.remote(self._load))

    def submit(self, task: bytes, pieces: bytes) -> Future[bytes]:
        return self._future(self._actor.run.remote(task, pieces))

    def answer(self, call: Future[bytes]) -> bytes:
        try:
            return call.result()
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            raise ProcessDied(type(error).__name__) from error

    def kill(self) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None

    def _future(self, reference: Any) -> Future[bytes]:
        future: Future[bytes] = reference.future()
        return future


@contextlib.contextmanager
def _initialized(ray: Any, **options: Any) -> Iterator[None]:
    """Use Ray in a block, and leave the settings of this process as they were."""
    environment, crashes = dict(os.environ), faulthandler.is_enabled()
    # Ray takes signals in the main thread alone.
    in_main = threading.current_thread() is threading.main_thread()
    terminate = signal.getsignal(signal.SIGTERM)
    level = logging.getLogger("ray").level
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    changed = {name for name, value in os.environ.items() if environment.get(name) != value}
    if in_main:
        signal.signal(signal.SIGTERM, terminate)
    if not crashes:
        faulthandler.disable()
    try:
        yield
    finally:
        ray.shutdown()
        logging.getLogger("ray").setLevel(level)
        for name in changed:
            os.environ.pop(name, None)
            os.environ.update({name: environment[name]} if name in environment else {})
