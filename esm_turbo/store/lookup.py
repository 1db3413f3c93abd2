"""Look-ups of contexts where a store keeps them: in the memory of a device, on the host and on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.store.flat import FlatContext
from esm_turbo.store.partitions import Partition
from esm_turbo.store.pool import ContextPool, PoolHold
from esm_turbo.store.tiers import Tier
from esm_turbo.store.usage import Usage

Entry = tuple[str, str]
"""Name of a partition, and key of a context in it."""

_log = logging.getLogger("esm_turbo")


class Lookup:
    """Finds contexts, keeps those that were found in memory, and counts where they were.

    Args:
        host_bytes: host memory for contexts; 0 keeps none.
        device_bytes: device memory for contexts; 0 keeps none. On the CPU only what is held is there.
        usage: of the store.

    Attributes:
        pool: contexts in the memory of devices.
        usage: of the store.

    Raises:
        ValueError: a budget is negative.
    """

    def __init__(self, host_bytes: int, device_bytes: int, usage: Usage) -> None:
        self.pool = ContextPool(device_bytes)
        self.usage = usage
        self._host = Tier[Entry, FlatContext](host_bytes)
        self._reported: set[Entry] = set()

    def find(self, partition: Partition | None, key: str, device: torch.device) -> FlatContext | None:
        """Finds a context in device memory, host memory or on disk, and returns it on the device; None if absent."""
        if partition is None:
            return None
        entry = (partition.name, key)
        context = self.pool.get(entry, device)
        if context is not None:
            self.usage.count("device")
            return context
        context = self._host.get(entry)
        if context is not None:
            self.usage.count("host")
            return self._keep_on_device(entry, context, device)
        context = self.read(partition, key)
        if context is None:
            return None
        self.usage.count("disk")
        return self._keep(entry, context, device)

    def read(self, partition: Partition | None, key: str) -> FlatContext | None:
        """Reads a context from disk; None if it is absent or damaged, which is reported once."""
        if partition is None:
            return None
        try:
            return partition.read_context(key)
        except ArtifactError as error:
            entry = (partition.name, key)
            if entry not in self._reported:
                self._reported.add(entry)
                self.usage.count("damaged")
                _log.warning("%s; it is computed again", error)
            return None

    def read_all(self, partition: Partition, keys: Iterable[str], device: torch.device) -> dict[str, FlatContext]:
        """Reads those contexts that are on disk and keeps them; by key, on the device."""
        found: dict[str, FlatContext] = {}
        for key in keys:
            context = self.read(partition, key)
            if context is not None:
                found[key] = self._keep((partition.name, key), context, device)
        return found

    def add(self, entry: Entry, context: FlatContext, device: torch.device) -> FlatContext:
        """Keeps a context that is now on disk, and returns it on the device."""
        self._reported.discard(entry)
        return self._keep(entry, context, device)

    def find_held(
        self, hold: PoolHold, partition: Partition | None, key: str, device: torch.device
    ) -> FlatContext | bool:
        """Finds a context and holds it in the pool.

        Returns:
            True if it is held, False if there is none; the context, on the device, if the pool has no room for it.
        """
        if partition is None:
            return False
        entry = partition.name, key
        if hold.add(entry, device):
            self.usage.count("device")
            return True
        context = self.find(partition, key, device)
        if context is None:
            return False
        return self.try_hold(hold, entry, context, device) or context

    def try_hold(self, hold: PoolHold, entry: Entry, context: FlatContext, device: torch.device) -> bool:
        """Puts a context into the pool and holds it there; False if there is no room beside what others hold."""
        return self.pool.put(entry, context, device) and hold.add(entry, device)

    def no_room(self, context: FlatContext) -> NotEnoughMemoryError:
        """The error for a context for which `find_held` or `try_hold` had no room."""
        info = self.pool.info()
        return NotEnoughMemoryError(
            f"the slot of a context of {context.nbytes:,} bytes does not fit into `device_bytes` of"
            f" {info['budget']:,}, of which {info['held']} contexts are held: give more, or hold fewer at a time"
        )

    def clear(self) -> None:
        """Frees the contexts in memory."""
        self._host.clear()
        self.pool.clear()

    def info(self) -> dict[str, Any]:
        """Budget and use of each kind of memory, JSON values."""
        return {"host": self._host.info(), "device": self.pool.info()}

    def _keep(self, entry: Entry, context: FlatContext, device: torch.device) -> FlatContext:
        """Keeps a context on the host and on the device, and returns it on the device."""
        if self._host.fits(context.nbytes):
            in_memory = context.in_memory(pinned=device.type == "cuda")
            self._host.put(entry, in_memory, in_memory.nbytes)
            if context.device != device:
                context = in_memory
        return self._keep_on_device(entry, context, device)

    def _keep_on_device(self, entry: Entry, context: FlatContext, device: torch.device) -> FlatContext:
        if device.type == "cpu":
            return context
        context = context.to(device)
        self.pool.put(entry, context, device)
        return context
