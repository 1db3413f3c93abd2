"""Which context each row of an extension reads, where rows name their contexts."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.transfers import to_device


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
        made: tiles of queries, by tokens per row, queries per tile, and device.
    """

    def __init__(self, contexts: npt.NDArray[np.int64]) -> None:
        self.contexts = contexts
        self._on_device: dict[torch.device, Tensor] = {}
        self.made: dict[tuple[int, int, torch.device], Tensor] = {}
        self._of_read: dict[torch.device, tuple[RowIndex, Tensor]] = {}

    def grouped(
        self, device: torch.device, ranks: npt.NDArray[np.int64] | None = None
    ) -> tuple[RowIndex, Tensor | None]:
        """The index of the rows in an order in which those of a context follow each other, and a context is read once.

        Args:
            device: of the order.
            ranks: of the contexts, where they have to be in order, too.

        Returns:
            The index, and the order, int64 [B] on the device; None if the rows are in it.
        """
        by = self.contexts if ranks is None else ranks[self.contexts]
        apart = len({group.context for group in self.groups}) == len(self.groups)
        if apart if ranks is None else bool((np.diff(by) >= 0).all()):
            return self, None
        order = np.argsort(by, kind="stable")
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
        """Gather each row's entry of x [C, ...], as [B, ...]."""
        return x[self.on(x.device)]

    @property
    def most_rows(self) -> int:
        """The largest number of rows that follow each other and read the same context."""
        return max(group.stop - group.start for group in self.groups)

    def tiles(self, num_tokens: int, queries: int, device: torch.device) -> Tensor:
        """Tiles of queries, which a kernel processes at once: those of neighbouring rows that read one context.

        A query is a token of a row; those of all rows are numbered in order. Made once.

        Args:
            num_tokens: queries of each row.
            queries: most of a tile.
            device: of the tiles.

        Returns:
            Of each tile its context, its first query, and the query after its last one, int32 [tiles, 3].
        """
        key = (num_tokens, queries, device)
        if key not in self.made:
            self.made[key] = to_device(torch.from_numpy(self._host_tiles(num_tokens, queries)), device)
        return self.made[key]

    def _host_tiles(self, num_tokens: int, queries: int) -> npt.NDArray[np.int32]:
        """See `tiles`."""
        groups = np.array(self.groups, dtype=np.int64)
        first, end = groups[:, 1] * num_tokens, groups[:, 2] * num_tokens
        counts = -(-(end - first) // queries)
        of_group = np.repeat(np.arange(len(groups)), counts)
        within = np.arange(len(of_group)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = first[of_group] + within * queries
        table = np.stack([groups[of_group, 0], starts, np.minimum(starts + queries, end[of_group])], axis=1)
        return table.astype(np.int32)

    def of_read(self, device: torch.device) -> tuple[RowIndex, Tensor]:
        """The index into the contexts that rows read alone, in their order, and these, int64 [read]; made once."""
        if device not in self._of_read:
            read, numbers = np.unique(self.contexts, return_inverse=True)
            self._of_read[device] = RowIndex(numbers), to_device(torch.from_numpy(read), device)
        return self._of_read[device]

    def on(self, device: torch.device) -> Tensor:
        """The contexts on a device, int64 [B]."""
        if device not in self._on_device:
            self._on_device[device] = to_device(torch.from_numpy(self.contexts), device)
        return self._on_device[device]


class StaticRowIndex(RowIndex):
    """An index in tensors with fixed addresses, for graphs to read; contexts of other rows can be loaded into it.

    Args:
        rows: number of rows.
        most_contexts: that these may name.
    """

    def __init__(self, rows: int, most_contexts: int) -> None:
        super().__init__(np.zeros(rows, dtype=np.int64))
        self._most_contexts = most_contexts

    def load(self, index: RowIndex) -> None:
        """Loads the contexts of as many rows, or fewer, that are grouped; further rows read what the last one reads."""
        rows = len(self)
        self.contexts = np.pad(index.contexts, (0, rows - len(index)), mode="edge")
        self.__dict__.pop("groups", None)
        for device, tensor in self._on_device.items():
            tensor.copy_(to_device(torch.from_numpy(self.contexts), device))
        for (num_tokens, queries, device), tiles in self.made.items():
            tiles.copy_(to_device(torch.from_numpy(self._host_tiles(num_tokens, queries)), device))

    def grouped(
        self, device: torch.device, ranks: npt.NDArray[np.int64] | None = None
    ) -> tuple[RowIndex, Tensor | None]:
        """The index as it is: whoever loads it has grouped the rows."""
        return self, None

    @property
    def most_rows(self) -> int:
        """The number of rows, which may all read one context."""
        return len(self)

    def _host_tiles(self, num_tokens: int, queries: int) -> npt.NDArray[np.int32]:
        """As many tiles as there can be; those beyond have no queries."""
        table = super()._host_tiles(num_tokens, queries)
        groups = min(len(self), self._most_contexts)
        most = (len(self) * num_tokens + groups * (queries - 1)) // queries
        return np.pad(table, ((0, most - len(table)), (0, 0)))


def of_rows(x: Tensor, index: RowIndex | None) -> Tensor:
    """Gather each row's entry of x [C, ...], as [B, ...]; x itself without an index."""
    return x if index is None else index.take(x)
