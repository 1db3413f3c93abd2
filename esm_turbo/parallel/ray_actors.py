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

from esm_turbo.files.extras import import_extra
from esm_turbo.parallel.pool import Pool, WorkerProcess
from esm_turbo.parallel.worker import LoadModel, PieceWorker


def import_ray() -> Any:
    """The package ray.

    Raises:
        ImportError: it is missing.
    """
    return import_extra("ray", "ray", "--engine ray needs")


class RayActors(Pool):
    """Actors that share the pieces of runs.

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
        make = ray.remote(PieceWorker).options(num_cpus=0 if on_gpu else threads, num_gpus=1 if on_gpu else 0).remote
        start = lambda name: _Actor(ray, make(name, threads))  # noqa: E731 - of what only this process has
        super().__init__([device] * count, start, ray.put(pickle.dumps(load)), "an actor")

    def close(self) -> None:
        """Leave the cluster; one that was started for the run is ended."""
        super().close()
        self._initialized.close()


class _Actor(WorkerProcess):
    """An actor of Ray that holds a `PieceWorker`.

    Args:
        ray: the package.
        actor: its handle.
    """

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def call(self, method: str, *arguments: Any) -> Future[bytes]:
        future: Future[bytes] = getattr(self._actor, method).remote(*arguments).future()
        return future

    def has_died_of(self, error: Exception) -> bool:
        errors = self._ray.exceptions
        return isinstance(error, errors.RayError) and not isinstance(error, errors.RayTaskError)

    def kill(self, error: Exception | None = None) -> str:
        self._ray.kill(self._actor)
        return type(error).__name__


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
