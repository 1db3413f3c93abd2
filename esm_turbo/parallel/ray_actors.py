"""Pieces on a Ray cluster: Ray Data streams them through actors, each with a model of its own.

Ray replaces actors and nodes that die and runs their pieces again. Results stream back to the process that started the
run, with back-pressure, and that process writes them: the cluster needs no shared folder, except for stores.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from esm_turbo.parallel.worker import LoadModel, portable
from esm_turbo.tasks.common.pieces import PieceProgress, Task
from esm_turbo.tasks.common.progress import Progress, silent

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")

# Times that a piece is run again whose actor has died.
_RETRIES = 3
# Blocks of the data set for every actor: each is what a death costs, and has some milliseconds of overhead.
_BLOCKS_PER_ACTOR = 64


def import_ray() -> Any:
    """The package ray, with Ray Data.

    Raises:
        ImportError: it is missing.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("--engine ray needs Ray: pip install 'esm-turbo[ray]'") from error
    return ray


class RayActors:
    """Actors that share the pieces of runs, a `Runner`.

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
        self.devices = device
        self._load, self._count, self._threads = pickle.dumps(load), count, threads
        self._ray = import_ray()
        self._started = not self._ray.is_initialized()
        if self._started:
            # Its actors must find what this process finds; a cluster has its own.
            local = {"num_cpus": max(count * threads, 1) + 1, "include_dashboard": False} if address is None else {}
            self._ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **local)
        context = self._ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        # What no actor survives is found below: other pieces go on.
        context.max_errored_blocks = -1
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cluster; one that was started for the run is ended."""
        if self._started:
            self._ray.shutdown()

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

        A piece whose actor has died four times counts as failed.

        Raises:
            Exception: what a piece raised.
        """
        counter = PieceProgress(stage, units, progress)
        left = dict.fromkeys(sorted(range(len(pieces)), key=lambda index: -units[index]))
        if not left:
            return
        items = [{"number": number, "piece": pickle.dumps(pieces[number])} for number in left]
        blocks = min(len(items), _BLOCKS_PER_ACTOR * self._count)
        on_gpu = self.devices.startswith("cuda")
        with warnings.catch_warnings():
            # Restarts and retries have no names of their own yet.
            warnings.simplefilter("ignore", DeprecationWarning)
            results = self._ray.data.from_items(items, override_num_blocks=blocks).map_batches(
                _Actor,
                fn_constructor_args=(self._load, pickle.dumps(work), self.devices, self._threads),
                batch_size=1,
                batch_format="numpy",
                compute=self._ray.data.ActorPoolStrategy(size=min(self._count, len(items))),
                num_cpus=0 if on_gpu else self._threads,
                num_gpus=1 if on_gpu else 0,
                max_restarts=-1,
                max_task_retries=_RETRIES,
            )
        for row in results.iter_rows():
            number, result = int(row["number"]), pickle.loads(row["result"])
            # A block that is computed again returns all its pieces again.
            if number not in left:
                continue
            if isinstance(result, _Raised):
                raise result.error
            del left[number]
            yield number, result
            counter.finish(number)
        for number in left:
            yield number, work.failed(pieces[number], f"its actor died {_RETRIES + 1} times")
            counter.finish(number)


class _Raised:
    """What a piece raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Actor:
    """Loads the model once, then runs pieces."""

    def __init__(self, load: bytes, work: bytes, device: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._turbo = pickle.loads(load)(device)
        self._work: Task[Any, Any] = pickle.loads(work)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        results = []
        try:
            pieces = [pickle.loads(piece) for piece in batch["piece"]]
            results = [pickle.dumps(result) for result in self._work.run(self._turbo, pieces, silent)]
        except Exception as error:
            results = [pickle.dumps(_Raised(portable(error)))] * len(batch["number"])
        return {"number": batch["number"], "result": results}
