"""Filling a store batch by batch: each is claimed, computed and written, and then put among the other contexts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from esm_turbo.store.files import StoreFiles
from esm_turbo.store.flat import ContextSpec, FlatBatch, FlatContext
from esm_turbo.store.lookup import Lookup
from esm_turbo.store.partitions import Partition, Staging
from esm_turbo.store.requests import PrefillRequest

_POLL_SECONDS = 0.1
# Contexts that are hashed and written at a time while a GPU waits; on a CPU the forward takes many times as long.
_CUDA_WRITERS = 8


class Computed(NamedTuple):
    """Contexts that were computed at once, a batch or a part of one."""

    keys: Sequence[str]
    contexts: FlatBatch


class StoredBatch(NamedTuple):
    """A batch of contexts that is in the store.

    Attributes:
        requests: the batch.
        contexts: by key.
        computed: number of those that this process computed.
    """

    requests: Sequence[PrefillRequest]
    contexts: dict[str, FlatContext]
    computed: int


class _PendingBatch(NamedTuple):
    """A batch of contexts that are being written, or were all there.

    Attributes:
        requests: the batch.
        partition: of the contexts.
        found: by key, those that were there.
        computed: by key, the others.
        staging: where they are written; None if none was missing.
        written: waits until they are, and raises what stopped that.
        claim: on the missing ones, ends with it.
    """

    requests: Sequence[PrefillRequest]
    partition: Partition
    found: dict[str, FlatContext]
    computed: dict[str, FlatContext]
    staging: Staging | None
    written: Callable[[], None]
    claim: contextlib.ExitStack


@dataclass(frozen=True)
class Filling:
    """Computes the contexts of batches and puts them into a store, together with other processes.

    Args:
        files: of the store.
        lookup: likewise.
        mutex: held while a batch is looked up, and while it is put among the others; not while it is computed, nor
            while another process writes.
        spec: kind of the contexts.
        device: of the model.
        prefill: computes contexts; those that it leaves out have failed.
    """

    files: StoreFiles
    lookup: Lookup
    mutex: threading.RLock
    spec: ContextSpec
    device: torch.device
    prefill: Callable[[Sequence[PrefillRequest]], Sequence[Computed]]

    def compute(self, batches: Iterable[Sequence[PrefillRequest]]) -> Iterator[StoredBatch]:
        """Computes all contexts of batches, and writes none."""
        for batch in batches:
            yield StoredBatch(batch, _by_key(self.prefill(batch)), len(batch))

    def fill(self, batches: Iterable[Sequence[PrefillRequest]], *, in_order: bool = False) -> Iterator[StoredBatch]:
        """Computes and writes the contexts of batches that are not in the store.

        A GPU computes a batch while the one before is written; a CPU has nothing to spare for that. A batch of which
        another process has claimed some is left to that process, until nothing has come on for the store's timeout.

        Args:
            batches: taken at most one ahead of the results.
            in_order: wait for a batch that another process has claimed. Otherwise such batches come last; by then they
                are usually there.

        Yields:
            Each batch, once it is in the store.

        Raises:
            ValueError: the store belongs to another model.
            FolderBusyError: (a ValueError) another process was writing for all of the store's timeout.
            OSError: writing failed, for example because the disk is full. The store remains intact.
        """
        coming, ahead = iter(batches), 1 if _writers(self.device) > 1 else 0
        pending: deque[_PendingBatch] = deque()
        # Batches left to other processes, and how many of them were tried since something last came on.
        claimed: deque[Sequence[PrefillRequest]] = deque()
        tried, since = 0, time.monotonic()
        try:
            while True:
                batch = None
                if len(pending) <= ahead:
                    if not (in_order and claimed) and (batch := next(coming, None)) is not None:
                        since = time.monotonic()
                    elif tried < len(claimed):
                        batch = claimed.popleft()
                        tried += 1
                if batch is not None:
                    one = self._begin(batch, waits=time.monotonic() - since < self.files.timeout)
                    if one is None:
                        claimed.append(batch)
                        continue
                    pending.append(one)
                elif pending:
                    # Also because other processes may wait for it.
                    yield self._finish(pending.popleft())
                elif claimed:
                    time.sleep(_POLL_SECONDS)
                    tried = 0
                    continue
                else:
                    return
                tried, since = 0, time.monotonic()
        finally:
            for one in pending:
                one.claim.close()

    def store(self, requests: Sequence[PrefillRequest]) -> StoredBatch:
        """Writes one batch whose contexts are known already, whether others have claimed it or not.

        Raises:
            ValueError, FolderBusyError, OSError: as of `fill`.
        """
        pending = self._begin(requests, waits=False)
        assert pending is not None
        return self._finish(pending)

    def _begin(self, requests: Sequence[PrefillRequest], *, waits: bool) -> _PendingBatch | None:
        """Reads a batch, or claims and computes it, and begins to write it.

        Args:
            requests: the batch.
            waits: leave contexts to a process that has claimed them.

        Returns:
            The batch, for `_finish`; None if some of it is left to another process.
        """
        with contextlib.ExitStack() as claim:
            # Readers do not wait for another process to release the lock.
            with self.files.locked(), self.mutex:
                partition = self.files.prepare(self.spec)
                found = self.lookup.read_all(partition, [one.key for one in requests], self.device)
                missing = [one for one in requests if one.key not in found]
                if missing:
                    keys = [one.key for one in missing]
                    if waits and not self.files.claimed_by_others().isdisjoint(keys):
                        return None
                    claim.enter_context(self.files.claim(keys))
            if not missing:
                return _PendingBatch(requests, partition, found, {}, None, lambda: None, claim.pop_all())
            staging = claim.enter_context(partition.staging())
            computed = self.prefill(missing)
            pairs = (pair for part in computed for pair in zip(part.keys, part.contexts.on_host(), strict=True))
            written = claim.enter_context(staging.writing(pairs, _writers(self.device)))
            return _PendingBatch(requests, partition, found, _by_key(computed), staging, written, claim.pop_all())

    def _finish(self, pending: _PendingBatch) -> StoredBatch:
        """Puts a batch among the other contexts once it is written."""
        filled, computed, partition = pending.found, pending.computed, pending.partition
        with pending.claim:
            pending.written()
            if pending.staging is None:
                return StoredBatch(pending.requests, filled, 0)
            with self.files.locked(), self.mutex:
                self.files.discard_unfinished()
                # Where claims do not work, another process may have computed the same.
                missing = [one.key for one in pending.requests if one.key not in filled]
                filled |= self.lookup.read_all(partition, missing, self.device)
                own = [key for key in computed if key not in filled]
                with self.files.batch(partition, own):
                    for key in own:
                        pending.staging.publish(key)
                for key in own:
                    filled[key] = self.lookup.add((partition.name, key), computed[key], self.device)
                self.lookup.usage.flush()
                self.lookup.usage.compact()
        return StoredBatch(pending.requests, filled, len(own))


def _writers(device: torch.device) -> int:
    """Number of contexts that are written at a time."""
    return _CUDA_WRITERS if device.type == "cuda" else 1


def _by_key(computed: Sequence[Computed]) -> dict[str, FlatContext]:
    return {key: one for part in computed for key, one in zip(part.keys, part.contexts.contexts, strict=True)}
