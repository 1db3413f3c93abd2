"""Calls of `TurboEsm` on several devices: what one process would compute, in pieces that several share.

A piece is computed by a call of the same function, so that whoever computes it, and how many do, results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from esm_turbo.parallel.workers import Workers
from esm_turbo.tasks.common.pieces import Task

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

Devices = str | Sequence[str] | Workers
"""`all`, names of devices, or processes that run already."""

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")


class DeviceRunner:
    """A `Runner` on devices: processes with copies of a model that live while pieces are run.

    Args:
        turbo: the model.
        devices: where copies of it run.
    """

    shares_files = True

    def __init__(self, turbo: ContextModel, devices: str | Sequence[str]) -> None:
        self._turbo, self._given = turbo, devices
        # Of a string, only `all` is allowed.
        self.devices = "cuda" if isinstance(devices, str) else " ".join(devices)

    def run(
        self, task: Task[PieceT, ResultT], pieces: Sequence[PieceT], **options: Any
    ) -> Iterator[tuple[int, ResultT]]:
        """See `Runner.run`.

        Raises:
            ValueError: no devices are named, or there are none.
        """
        with Workers.of(self._turbo, self._names()) as workers:
            yield from workers.run(task, pieces, **options)

    def _names(self) -> Sequence[str]:
        if not isinstance(self._given, str):
            return self._given
        if self._given != "all":
            raise ValueError(
                "`devices` must be 'all', a list of names such as ['cuda:0', 'cuda:1'], or Workers, got"
                f" {self._given!r}"
            )
        if not (names := cuda_devices()):
            raise ValueError("devices='all' finds no CUDA device here; on the CPU, name it once for every process")
        return names


def cuda_devices() -> tuple[str, ...]:
    """Names of all CUDA devices of this machine."""
    import torch

    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
