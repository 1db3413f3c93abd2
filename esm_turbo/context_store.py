"""A folder of compressed contexts, computed once and read by any number of processes.

A context is identified by everything that `ContextModel.prefill` depends on: its tokens, the counts for token dropout,
the model, the preset, the calibration and the dtype. Files are written whole or not at all and have checksums; damaged
contexts are reported and computed again. Recently used contexts are kept in memory, on the host and on the device.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from esm_turbo.config import TurboConfig
from esm_turbo.context_model import ContextModel, Sequences, as_list, totals_per_row
from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.kinds import is_store
from esm_turbo.files.tabular import named
from esm_turbo.files.writing import only_writer
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.proteins.batches import TokenRow, encode_rows, remaining_batches
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.store.claims import Claims
from esm_turbo.store.files import FORMAT_VERSION, Partition, Staging, StoreFiles, context_spec
from esm_turbo.store.flat import ContextSpec, FlatBatch, FlatContext
from esm_turbo.store.pool import ContextPool, PoolHold
from esm_turbo.store.tiers import Tier
from esm_turbo.store.usage import Usage, rates
from esm_turbo.tasks.common.arms import FoundContexts, protein_tokens
from esm_turbo.tasks.common.memory import cache_bytes, check_memory, halve_until_it_fits, too_large
from esm_turbo.tasks.common.progress import Progress, silent

__all__ = ["ContextStore", "context_key", "is_store", "store_info"]

_GIB = 1 << 30
_POLL_SECONDS = 0.1
# Contexts that are hashed and written at a time while a GPU waits; on a CPU the forward takes many times as long.
_CUDA_WRITERS = 8
_KEY = re.compile("[0-9a-f]{64}")
_log = logging.getLogger("esm_turbo")


@dataclass(frozen=True)
class _Job:
    """One requested context.

    Attributes:
        key: of its file.
        sequence: residues as given.
        tokens: number of tokens, `<cls>` and the residues.
        masks: number of `<mask>` tokens among them.
        total_tokens: for token dropout, see `ContextModel.prefill`.
        total_masks: likewise.
    """

    key: str
    sequence: str
    tokens: int
    masks: int
    total_tokens: int
    total_masks: int


class _Filled(NamedTuple):
    """A batch of contexts that is in the store.

    Attributes:
        batch: indices of its jobs.
        contexts: by key.
        computed: number of those that this process computed.
    """

    batch: Sequence[int]
    contexts: dict[str, FlatContext]
    computed: int


class _Begun(NamedTuple):
    """A batch of contexts that is being written, or needs not be.

    Attributes:
        partition: of the contexts.
        found: by key, those that were there.
        missing: the others.
        batches: what was computed, with the keys.
        staging: where they are written; None if none is missing.
        written: waits until they are, and raises what stopped that.
        claim: on the missing ones, ends with it.
    """

    partition: Partition
    found: dict[str, FlatContext]
    missing: Sequence[_Job]
    batches: Sequence[tuple[list[str], FlatBatch]]
    staging: Staging | None
    written: Callable[[], None]
    claim: contextlib.ExitStack


class ContextStore:
    """Compressed contexts on disk, with recently used ones in memory.

    Several processes may read and write one store. Those that fill it share the work: each claims a batch before
    computing it, and leaves batches that others have claimed to them. Each writes the files of its own batch; one at a
    time puts them among the others. What a process that is killed while writing leaves behind is never read.

    Its methods take a model, whose preset decides what is looked up and stored, and the arguments of its `prefill`.

    Args:
        folder: of a store; a new or empty one becomes a store with the first context.
        host_bytes: host memory for contexts in bytes, pinned if the model is on a CUDA device; 0 keeps none.
        device_bytes: device memory for contexts in bytes; 0 keeps none. On the CPU only `hold` and `hold_found` use it.
        lock_timeout: seconds to wait for another process that is writing; and for one that computes what is wanted,
            before it is computed here too.
        read_only: compute missing contexts, but do not write them.

    Raises:
        ValueError: the folder holds something else, was written by another version or is damaged, or a budget is
            negative.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        host_bytes: int = _GIB,
        device_bytes: int = _GIB,
        lock_timeout: float = 60.0,
        read_only: bool = False,
    ) -> None:
        if lock_timeout < 0:
            raise ValueError(f"`lock_timeout` must be at least 0 seconds, got {lock_timeout}")
        self.folder = Path(folder)
        self.lock_timeout = lock_timeout
        self.read_only = read_only
        self._files = StoreFiles(self.folder)
        self._claims = Claims(self.folder)
        self._budgets = host_bytes, device_bytes
        self._host = Tier[tuple[str, str], FlatContext](host_bytes)
        self._pool = ContextPool(device_bytes)
        self._usage = Usage(self.folder)
        self._reported: set[tuple[str, str]] = set()
        self._swept = False
        self._mutex = threading.RLock()
        self._flush = weakref.finalize(self, self._usage.flush)

    def __repr__(self) -> str:
        return named(self, repr(str(self.folder)), read_only=self.read_only or None)

    def __reduce__(self) -> Any:
        """In another process, the same folder is opened, and nothing is in memory."""
        # Another process may be in another folder.
        return _reopened, (self.folder.absolute(), *self._budgets, self.lock_timeout, self.read_only)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the contexts in memory and writes the counts of hits. The store can still be used."""
        with self._mutex:
            self._host.clear()
            self._pool.clear()
            self._usage.flush()

    def check_model(self, turbo: ContextModel) -> None:
        """Makes sure that the store belongs to a model, or is new.

        Raises:
            ValueError: it belongs to another one.
        """
        with self._mutex:
            self._files.partition(context_spec(turbo, TurboConfig.from_preset("exact")))

    def get(
        self,
        turbo: ContextModel,
        sequences: Sequences,
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
    ) -> list[TurboKVCache | None]:
        """Looks contexts up without computing any.

        Returns:
            For each sequence a cache of one row, on the model's device, or None.

        Raises:
            ValueError: a sequence is invalid, or the store belongs to another model.
        """
        with self._mutex:
            jobs = _jobs(turbo, sequences, total_tokens, total_masks)
            spec = context_spec(turbo)
            partition = self._files.partition(spec)
            found = [self._look_up(partition, job.key, turbo.model.device) for job in jobs]
            for _ in range(found.count(None)):
                self._usage.count("missed")
            return [None if context is None else context.clone().cache(spec) for context in found]

    def load(self, turbo: ContextModel, key: str) -> TurboKVCache | None:
        """Looks a context up by its key, see `context_key`; a cache of one row on the model's device, or None.

        What is no key finds nothing.

        Raises:
            ValueError: the store belongs to another model.
        """
        if _KEY.fullmatch(key) is None:
            return None
        with self._mutex:
            spec = context_spec(turbo)
            context = self._look_up(self._files.partition(spec), key, turbo.model.device)
            if context is None:
                self._usage.count("missed")
                return None
            return context.clone().cache(spec)

    def get_or_prefill(
        self,
        turbo: ContextModel,
        sequences: Sequences,
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
        *,
        toks_per_batch: int | None = None,
    ) -> TurboKVCache:
        """As `ContextModel.prefill`, but computes and stores only what is not in the store.

        `toks_per_batch` is the maximum number of padded tokens per batch; None is 16,384 on CUDA, and else 4,096.

        Raises:
            ValueError: a sequence is invalid, or the store belongs to another model.
            FolderBusyError: (a ValueError) another process was writing for all of `lock_timeout`.
            OSError: writing failed, for example because the disk is full. The store remains intact.
        """
        with self._mutex:
            jobs = _jobs(turbo, sequences, total_tokens, total_masks)
            unique = list({job.key: job for job in jobs}.values())
            spec = context_spec(turbo)
            partition = self._files.partition(spec)
            found: dict[str, FlatContext] = {}
            for job in unique:
                context = self._look_up(partition, job.key, turbo.model.device)
                if context is not None:
                    found[job.key] = context
            done = {index for index, job in enumerate(unique) if job.key in found}
            for filled in self._fill(turbo, spec, unique, done, toks_per_batch):
                found |= filled.contexts
            if len(jobs) == 1:
                return found[jobs[0].key].clone().cache(spec)
            caches = {key: context.cache(spec) for key, context in found.items()}
            # `cat` copies, so that changes of the result do not reach the contexts kept in memory.
            return TurboKVCache.cat([caches[job.key] for job in jobs])

    def hold(
        self,
        turbo: ContextModel,
        sequences: Sequences,
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
        *,
        toks_per_batch: int | None = None,
    ) -> PooledContexts:
        """As `get_or_prefill`, but the contexts are read where they lie in the memory of `device_bytes`.

        They stay there until they are released: at the end of a `with` block, by `release()`, or with the last
        reference. Other contexts come and go meanwhile, also from other threads. On the CPU it is the same.

        Returns:
            One row per sequence, for `past_key_values` and `context_index`; nothing can be appended to it.

        Raises:
            NotEnoughMemoryError: they do not fit beside contexts that others hold. None of them is held then.
            ValueError, FolderBusyError, OSError: as of `get_or_prefill`.
        """
        with self._mutex:
            jobs = _jobs(turbo, sequences, total_tokens, total_masks)
            unique = list({job.key: job for job in jobs}.values())
            spec, device, hold = context_spec(turbo), turbo.model.device, self._pool.hold()
            partition = self._files.partition(spec)
            done: set[int] = set()
            entries: dict[str, tuple[str, str]] = {}
            try:
                for index, job in enumerate(unique if partition is not None else ()):
                    assert partition is not None
                    entry = partition.name, job.key
                    if hold.add(entry, device):
                        self._usage.count("device")
                    elif (context := self._look_up(partition, job.key, device)) is not None:
                        self._hold(hold, entry, context, device)
                    else:
                        continue
                    done.add(index)
                    entries[job.key] = entry
                for filled in self._fill(turbo, spec, unique, done, toks_per_batch):
                    partition = self._files.partition(spec)
                    # What is not stored is not found again: of contexts in memory, partitions tell the kinds apart.
                    name = uuid.uuid4().hex if partition is None else partition.name
                    for key, context in filled.contexts.items():
                        entries[key] = name, key
                        self._hold(hold, entries[key], context, device)
                return hold.contexts([entries[job.key] for job in jobs], spec)
            except BaseException:
                hold.release()
                raise

    def _hold(self, hold: PoolHold, entry: tuple[str, str], context: FlatContext, device: torch.device) -> None:
        """Puts a context into the pool and holds it there."""
        if self._pool.put(entry, context, device) and hold.add(entry, device):
            return
        info = self._pool.info()
        raise NotEnoughMemoryError(
            f"a context of {context.nbytes:,} bytes does not fit into `device_bytes` of {info['budget']:,}, of which"
            f" {info['held']} contexts are held: hold fewer at a time"
        )

    def find(self, turbo: ContextModel, token_ids: Sequence[int], config: TurboConfig) -> TurboKVCache | None:
        """The context of exactly these tokens, see `get_or_compute`, or None. Only what is found is counted."""
        with self._mutex:
            row = np.array(token_ids, dtype=np.uint8)
            key = _key(row, len(row), token_ids.count(turbo.codes.mask))
            spec = context_spec(turbo, config)
            context = self._look_up(self._files.partition(spec), key, turbo.model.device)
            return None if context is None else context.clone().cache(spec)

    def hold_found(self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], config: TurboConfig) -> FoundContexts:
        """Holds those contexts of exactly these tokens that are in the store, as `hold` does, and computes none.

        Those for which the memory of `device_bytes` has no room beside what is held are copied, as by `find`.

        Args:
            turbo: the model.
            token_ids: of each row, all different.
            config: options under which they are stored.

        Raises:
            ValueError: the store belongs to another model.
        """
        with self._mutex:
            spec, device, hold = context_spec(turbo, config), turbo.model.device, self._pool.hold()
            partition = self._files.partition(spec)
            entries: dict[int, tuple[str, str]] = {}
            copied: dict[int, TurboKVCache] = {}
            try:
                for number, ids in enumerate(token_ids if partition is not None else ()):
                    assert partition is not None
                    row = np.array(ids, dtype=np.uint8)
                    entry = partition.name, _key(row, len(row), int((row == turbo.codes.mask).sum()))
                    if hold.add(entry, device):
                        self._usage.count("device")
                    elif (context := self._look_up(partition, entry[1], device)) is None:
                        continue
                    elif not (self._pool.put(entry, context, device) and hold.add(entry, device)):
                        copied[number] = context.clone().cache(spec)
                        continue
                    entries[number] = entry
                held = hold.contexts(entries.values(), spec) if entries else None
            except BaseException:
                hold.release()
                raise
            return FoundContexts(held, tuple(entries), copied)

    def get_or_compute(
        self,
        turbo: ContextModel,
        token_ids: Sequence[int],
        config: TurboConfig,
        compute: Callable[[], TurboKVCache],
    ) -> TurboKVCache:
        """The context of exactly these tokens, special ones included; computed and stored if it is missing.

        Args:
            turbo: the model.
            token_ids: of one row.
            config: options under which it is stored.
            compute: computes it; returns a cache of one row. Called under the store's lock.

        Raises:
            ValueError, FolderBusyError, OSError: as of `get_or_prefill`.
        """
        with self._mutex:
            row = np.array(token_ids, dtype=np.uint8)
            key = _key(row, len(row), token_ids.count(turbo.codes.mask))
            spec, device = context_spec(turbo, config), turbo.model.device
            context = self._look_up(self._files.partition(spec), key, device)
            if context is None:
                self._usage.count("missed")
                if self.read_only:
                    return compute()
                with only_writer(self.folder, timeout=self.lock_timeout, keep=True):
                    partition = self._files.make_partition(spec)
                    self._sweep()
                    self._files.discard_unfinished()
                    # Another process may have written it while this one waited for the lock.
                    context = self._read(partition, key)
                    if context is None:
                        context = FlatContext.of(compute())
                        partition.write_context(key, context)
                        self._reported.discard((partition.name, key))
                    context = self._keep((partition.name, key), context, device)
                    self._usage.flush()
                    self._usage.compact()
            return context.clone().cache(spec)

    def add(
        self,
        turbo: ContextModel,
        sequences: Sequences,
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
        *,
        toks_per_batch: int | None = None,
        progress: Progress | None = None,
        on_failure: Callable[[str, str], None] | None = None,
    ) -> int:
        """Computes and stores missing contexts, batch by batch, in memory that does not grow with their number.

        Contexts in the store are read and checked. A run that was interrupted anywhere ends in the same bits as another
        if sequences, `toks_per_batch` (None: kind of device) and memory are the same: it computes the same batches.
        Sequences that are added to others, and damaged contexts, are computed in batches of their own and may differ by
        rounding.

        `progress` is called with stage `check` and contexts, then with `prefill` and residues, see `Progress`;
        `on_failure` with each sequence that does not fit into memory, and the reason. The others are stored.

        Returns:
            Number of contexts computed.

        Raises:
            NotEnoughMemoryError: a sequence does not fit into memory, and `on_failure` is None.
            ValueError, FolderBusyError, OSError: as of `get_or_prefill`, and if the store is `read_only`.
        """
        self._refuse_read_only()
        report = progress or silent
        with self._mutex:
            jobs = list({job.key: job for job in _jobs(turbo, sequences, total_tokens, total_masks)}.values())
            spec = context_spec(turbo)
            done = self._done(spec, jobs, report)
            self._sweep()
            residues, total = 0, sum(job.tokens - 1 for index, job in enumerate(jobs) if index not in done)
            report("prefill", 0, total)
            computed = 0
            for filled in self._fill(turbo, spec, jobs, done, toks_per_batch, counted=False, on_failure=on_failure):
                computed += filled.computed
                residues += sum(jobs[index].tokens - 1 for index in filled.batch)
                report("prefill", residues, total)
            return computed

    def add_batches(
        self,
        turbo: ContextModel,
        batches: Iterable[Sequence[str]],
        on_failure: Callable[[str, str], None] | None = None,
    ) -> Iterator[int]:
        """As `add` of each batch, which is computed at once. A GPU computes one while that before is written.

        Args:
            turbo: the model.
            batches: sequences of each; taken at most one ahead of the results.
            on_failure: as of `add`, called before the result of the batch.

        Yields:
            For each batch the number of contexts computed.

        Raises:
            NotEnoughMemoryError, ValueError, FolderBusyError, OSError: as of `add`.
        """
        self._refuse_read_only()
        spec, device = context_spec(turbo), turbo.model.device
        begun: deque[_Begun] = deque()

        def begin(jobs: Sequence[_Job], since: float) -> bool:
            with self._mutex:
                one = self._begin(turbo, spec, jobs, on_failure, time.monotonic() - since < self.lock_timeout)
            if one is not None:
                begun.append(one)
            return one is not None

        def finish() -> int:
            with self._mutex:
                return self._finish(begun.popleft(), device)[1]

        try:
            for batch in batches:
                jobs = list({job.key: job for job in _jobs(turbo, batch, None, None)}.values())
                with self._mutex:
                    done = self._done(spec, jobs, silent)
                missing, since = [job for index, job in enumerate(jobs) if index not in done], time.monotonic()
                warn_if_long((job.tokens - 1 for job in missing), turbo.model.family, stacklevel=3)
                while not begin(missing, since):
                    # Another process computes it, which may wait for what is begun here.
                    if begun:
                        yield finish()
                    else:
                        time.sleep(_POLL_SECONDS)
                while len(begun) > _ahead(turbo):
                    yield finish()
            while begun:
                yield finish()
        finally:
            for one in begun:
                one.claim.close()

    def _refuse_read_only(self) -> None:
        if self.read_only:
            raise ValueError(f"{self.folder}: opened with `read_only`: nothing can be added")

    def _done(self, spec: ContextSpec, jobs: Sequence[_Job], report: Progress) -> set[int]:
        """Indices of the contexts that are in the store, undamaged."""
        partition = self._files.partition(spec)
        if self._files.is_unfinished():
            with only_writer(self.folder, timeout=self.lock_timeout, keep=True):
                self._files.discard_unfinished()
        done: set[int] = set()
        for index, job in enumerate(jobs):
            if self._read(partition, job.key) is not None:
                done.add(index)
            if done:
                report("check", index + 1, len(jobs))
        return done

    def sweep(self) -> None:
        """Remove what killed processes left half-written; what running ones write stays.

        Raises:
            ValueError: another process holds the store's lock for too long.
            OSError: a file cannot be removed.
        """
        with self._mutex:
            if self.folder.exists():
                with only_writer(self.folder, timeout=self.lock_timeout, keep=True):
                    self._files.remove_temporaries()

    def count_missing(self, turbo: ContextModel, sequences: Sequence[str]) -> int:
        """Number of sequences whose contexts have no file; what is in the files is not read."""
        with self._mutex:
            partition = self._files.partition(context_spec(turbo))
            jobs = _jobs(turbo, sequences, None, None) if sequences else []
            return sum(partition is None or not partition.path(job.key).exists() for job in jobs)

    def info(self) -> dict[str, Any]:
        """Contents and usage of the store, JSON values.

        Returns:
            `model`, `geometry`, `presets` (contexts and bytes on disk of each), their sums `contexts` and `bytes`,
            `memory` (contexts held by this object) and `usage` (look-ups of all processes, and hit rates by place).
        """
        with self._mutex:
            self._files.read_header()
            header = self._files.header
            presets = [partition.info() for partition in self._files.partitions()]
            return {
                "kind": "context_store",
                "format_version": FORMAT_VERSION,
                "model": None if header is None else header.model,
                "geometry": None if header is None else header.geometry.to_dict(),
                "presets": presets,
                "contexts": sum(preset["contexts"] for preset in presets),
                "bytes": sum(preset["bytes"] for preset in presets),
                "memory": {"host": self._host.info(), "device": self._pool.info()},
                "usage": rates(self._usage.totals()),
            }

    def _look_up(self, partition: Partition | None, key: str, device: torch.device) -> FlatContext | None:
        """Finds a context in device memory, host memory or on disk, and returns it on the device; None if absent."""
        if partition is None:
            return None
        entry = (partition.name, key)
        context = self._pool.get(entry, device)
        if context is not None:
            self._usage.count("device")
            return context
        context = self._host.get(entry)
        if context is not None:
            self._usage.count("host")
            return self._keep_on_device(entry, context, device)
        context = self._read(partition, key)
        if context is None:
            return None
        self._usage.count("disk")
        return self._keep(entry, context, device)

    def _read(self, partition: Partition | None, key: str) -> FlatContext | None:
        if partition is None:
            return None
        try:
            return partition.read_context(key)
        except ArtifactError as error:
            entry = (partition.name, key)
            if entry not in self._reported:
                self._reported.add(entry)
                self._usage.count("damaged")
                _log.warning("%s; it is computed again", error)
            return None

    def _keep(self, entry: tuple[str, str], context: FlatContext, device: torch.device) -> FlatContext:
        """Keeps a context in both tiers, and returns it on the device."""
        if self._host.fits(context.nbytes):
            in_memory = context.in_memory(pinned=device.type == "cuda")
            self._host.put(entry, in_memory)
            if context.device != device:
                context = in_memory
        return self._keep_on_device(entry, context, device)

    def _keep_on_device(self, entry: tuple[str, str], context: FlatContext, device: torch.device) -> FlatContext:
        if device.type == "cpu":
            return context
        context = context.to(device)
        self._pool.put(entry, context, device)
        return context

    def _sweep(self) -> None:
        """Removes, once, the temporary files of killed writers."""
        if not self._swept and self.folder.exists():
            self._files.remove_temporaries()
            self._swept = True

    def _fill(
        self,
        turbo: ContextModel,
        spec: ContextSpec,
        jobs: Sequence[_Job],
        done: set[int],
        toks_per_batch: int | None,
        *,
        counted: bool = True,
        on_failure: Callable[[str, str], None] | None = None,
    ) -> Iterator[_Filled]:
        """Computes and stores contexts batch by batch, without the jobs that are `done`; `counted` as misses.

        Each batch is claimed before it is computed. Batches that other processes have claimed come last; by then they
        are usually there. A GPU computes a batch while the one before is written; a CPU has nothing to spare for that.
        """
        lengths = (job.tokens - 1 for index, job in enumerate(jobs) if index not in done)
        warn_if_long(lengths, turbo.model.family, stacklevel=4)
        pending = deque(remaining_batches([job.tokens for job in jobs], protein_tokens(toks_per_batch, turbo), done))
        if self.read_only:
            for batch in pending:
                filled = _by_key(self._prefill(turbo, [jobs[index] for index in batch], on_failure))
                self._usage.count("missed", len(batch) if counted else 0)
                yield _Filled(batch, filled, len(batch))
            return
        put_off, since = 0, time.monotonic()
        ahead = _ahead(turbo)
        begun: deque[tuple[list[int], _Begun]] = deque()
        try:
            while pending or begun:
                if pending and len(begun) <= ahead:
                    batch = pending.popleft()
                    waits = time.monotonic() - since < self.lock_timeout
                    one = self._begin(turbo, spec, [jobs[index] for index in batch], on_failure, waits)
                    if one is None:
                        pending.append(batch)
                        put_off += 1
                    else:
                        begun.append((batch, one))
                        put_off, since = 0, time.monotonic()
                    # Others first, unless all that are left are claimed.
                    if len(begun) <= ahead and put_off < len(pending):
                        continue
                    if not begun:
                        time.sleep(_POLL_SECONDS)
                        continue
                batch, one = begun[0]
                filled, computed = self._finish(one, turbo.model.device)
                begun.popleft()
                # Also a miss if another process has written it in the meantime.
                self._usage.count("missed", len(batch) if counted else 0)
                yield _Filled(batch, filled, computed)
                put_off, since = 0, time.monotonic()
        finally:
            for _, one in begun:
                one.claim.close()

    def _begin(
        self,
        turbo: ContextModel,
        spec: ContextSpec,
        wanted: Sequence[_Job],
        on_failure: Callable[[str, str], None] | None,
        waits: bool,
    ) -> _Begun | None:
        """Reads a batch, or claims and computes it, and begins to write it.

        Args:
            wanted: the batch.
            waits: leave contexts to a process that has claimed them.

        Returns:
            The batch, for `_finish`; None if some of it is left to another process.
        """
        with contextlib.ExitStack() as claim:
            with only_writer(self.folder, timeout=self.lock_timeout, keep=True):
                partition = self._files.make_partition(spec)
                self._sweep()
                self._files.discard_unfinished()
                found = self._read_all(partition, wanted, turbo.model.device)
                missing = [job for job in wanted if job.key not in found]
                claimed = self._claims.of_others() if missing else set()
                if waits and any(job.key in claimed for job in missing):
                    return None
                if missing:
                    claim.enter_context(self._claims.claim([job.key for job in missing]))
            if not missing:
                return _Begun(partition, found, (), (), None, lambda: None, claim.pop_all())
            staging = claim.enter_context(partition.staging())
            batches = self._prefill(turbo, missing, on_failure)
            pairs = (pair for keys, flat in batches for pair in zip(keys, flat.on_host(), strict=True))
            written = claim.enter_context(staging.writing(pairs, _writers(turbo)))
            return _Begun(partition, found, missing, batches, staging, written, claim.pop_all())

    def _finish(self, begun: _Begun, device: torch.device) -> tuple[dict[str, FlatContext], int]:
        """Puts a batch among the other contexts once it is written.

        Returns:
            Its contexts by key, and the number of those that were computed.
        """
        with begun.claim:
            begun.written()
            filled, computed, partition = begun.found, _by_key(begun.batches), begun.partition
            if begun.staging is None:
                return filled, 0
            with only_writer(self.folder, timeout=self.lock_timeout, keep=True):
                self._files.discard_unfinished()
                # Where claims do not work, another process may have computed the same.
                filled |= self._read_all(partition, begun.missing, device)
                own = [key for key in computed if key not in filled]
                with self._files.batch(partition, own):
                    for key in own:
                        begun.staging.publish(key)
                for key in own:
                    self._reported.discard((partition.name, key))
                    filled[key] = self._keep((partition.name, key), computed[key], device)
                self._usage.flush()
                self._usage.compact()
        return filled, len(own)

    def _read_all(self, partition: Partition, jobs: Sequence[_Job], device: torch.device) -> dict[str, FlatContext]:
        """The contexts that are on disk, by key."""
        found: dict[str, FlatContext] = {}
        for job in jobs:
            context = self._read(partition, job.key)
            if context is not None:
                found[job.key] = self._keep((partition.name, job.key), context, device)
        return found

    def _prefill(
        self, turbo: ContextModel, jobs: Sequence[_Job], on_failure: Callable[[str, str], None] | None
    ) -> list[tuple[list[str], FlatBatch]]:
        """Computes contexts at once, in parts if memory requires it; returns those of each with their keys."""
        esm = turbo.model.base_model

        def prefill(part: Sequence[int]) -> tuple[list[str], FlatBatch]:
            own = [jobs[index] for index in part]
            longest = max(job.tokens for job in own)
            check_memory(esm, longest, rows=len(own), more=cache_bytes(esm, longest * len(own)))
            totals: dict[str, list[int]] = {}
            if any((job.total_tokens, job.total_masks) != (job.tokens, job.masks) for job in own):
                totals = {
                    "total_tokens": [job.total_tokens for job in own],
                    "total_masks": [job.total_masks for job in own],
                }
            cache = turbo.prefill([job.sequence for job in own], **totals)
            return [job.key for job in own], FlatBatch.of(cache, [job.tokens for job in own])

        def fail(index: int, error: Exception) -> None:
            reason = too_large(jobs[index].tokens - 1, turbo.model.device)
            if on_failure is None:
                raise NotEnoughMemoryError(f"a sequence: {reason}")
            on_failure(jobs[index].sequence, reason)

        return halve_until_it_fits(prefill, range(len(jobs)), fail)


def _writers(turbo: ContextModel) -> int:
    """Number of contexts that are written at a time."""
    return _CUDA_WRITERS if turbo.model.device.type == "cuda" else 1


def _ahead(turbo: ContextModel) -> int:
    """Number of batches that are computed while another one is written."""
    return 1 if _writers(turbo) > 1 else 0


def _by_key(batches: Sequence[tuple[list[str], FlatBatch]]) -> dict[str, FlatContext]:
    return {key: context for keys, flat in batches for key, context in zip(keys, flat.contexts, strict=True)}


def context_key(turbo: ContextModel, sequence: str | ProteinRecord) -> str:
    """The key of a sequence's context in a store: a digest of its tokens, 64 hexadecimal digits.

    Raises:
        ValueError: the sequence is invalid.
    """
    return _jobs(turbo, sequence, None, None)[0].key


def _reopened(folder: Path, host_bytes: int, device_bytes: int, lock_timeout: float, read_only: bool) -> ContextStore:
    return ContextStore(
        folder, host_bytes=host_bytes, device_bytes=device_bytes, lock_timeout=lock_timeout, read_only=read_only
    )


def _jobs(
    turbo: ContextModel,
    sequences: Sequences,
    total_tokens: int | Sequence[int] | None,
    total_masks: int | Sequence[int] | None,
) -> list[_Job]:
    sequences = as_list(sequences)
    rows = encode_rows(turbo.codes, sequences, eos=False)
    tokens = [len(row) for row in rows]
    masks = [int((row == turbo.codes.mask).sum()) for row in rows]
    all_tokens = totals_per_row("total_tokens", total_tokens, tokens)
    all_masks = totals_per_row("total_masks", total_masks, masks)
    jobs = []
    for sequence, row, *counts in zip(sequences, rows, tokens, masks, all_tokens, all_masks, strict=True):
        jobs.append(_Job(_key(row, *counts[2:]), sequence, *counts))
    return jobs


def _key(row: TokenRow, total_tokens: int, total_masks: int) -> str:
    """A digest of everything that a context depends on besides model, preset, calibration and dtype."""
    return hashlib.sha256(row.tobytes() + f"|{total_tokens}|{total_masks}".encode()).hexdigest()


def store_info(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents and usage of a store for `esm-turbo info`.

    Raises:
        ValueError: the store was written by another version, or is damaged.
    """
    info = ContextStore(folder, read_only=True).info()
    # Of this new object, which holds nothing.
    del info["memory"]
    return info
