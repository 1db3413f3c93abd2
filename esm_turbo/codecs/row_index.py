"""Which context each row of an extension reads, where rows name their contexts."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Group(NamedTuple):
    """Rows of an extension that read the same context: those from `start` to before `stop`."""

    context: int
    start: int
    stop: int


class RowIndex:
    """The context of each row of an extension, known to the host.

    Args:
        contexts: number of each row's context, int64 [B].

    Attributes:
        contexts: as given.
    """

    def __init__(self, contexts: npt.NDArray[np.int64]) -> None:
        self.contexts = contexts
        self._on_device: dict[torch.device, Tensor] = {}

    def grouped(self, device: torch.device) -> tuple[RowIndex, Tensor | None]:
        """The index of the rows in an order in which those of a context follow each other, and a context is read once.

        Returns:
            The index, and the order, int64 [B] on the device; None if the rows are in it.
        """
        if len({group.context for group in self.groups}) == len(self.groups):
            return self, None
        order = np.argsort(self.contexts, kind="stable")
        return RowIndex(self.contexts[order]), to_device(torch.from_numpy(order), device)

    def __len__(self) -> int:
        return len(self.contexts)

    @cached_property
    def groups(self) -> list[Group]:
        """The runs of rows that read the same context, in order."""
        changes = np.flatnonzero(np.diff(self.contexts)) + 1
        bounds = [0, *changes.tolist(), len(self.contexts)]
        return [Group(int(self.contexts[start]), start, stop) for start, stop in pairwise(bounds)]

    def take(self, x: Tensor) -> Tensor:
        """What each row reads of x [C, ...], as [B, ...]."""
        return x[self._on(x.device)]

    def _on(self, device: torch.device) -> Tensor:
        """The contexts on a device, int64 [B]."""
        if device not in self._on_device:
            self._on_device[device] = to_device(torch.from_numpy(self.contexts), device)
        return self._on_device[device]


def of_rows(x: Tensor, index: RowIndex | None) -> Tensor:
    """What each row reads of x [C, ...], as [B, ...]; x itself without an index."""
    return x if index is None else index.take(x)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
