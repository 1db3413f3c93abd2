"""A folder of compressed contexts, computed once and read by any number of processes.

A context is identified by everything that `ContextModel.prefill` depends on: its tokens, the counts for token dropout,
the model, the preset, the calibration and the dtype. Files are written whole or not at all and have checksums; damaged
contexts are reported and computed again. Recently used contexts are kept in memory, on the host and on the device.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from esm_turbo.config import TurboConfig
from esm_turbo.context_model import ContextModel, Sequences
from esm_turbo.files.identity import ModelIdentity
from esm_turbo.files.kinds import is_store
from esm_turbo.files.tabular import named
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.proteins.batches import remaining_batches
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.store.files import StoreFiles, context_spec
from esm_turbo.store.filling import Computed, Filling, StoredBatch
from esm_turbo.store.flat import ContextSpec, FlatBatch, FlatContext
from esm_turbo.store.lookup import Lookup
from esm_turbo.store.partitions import FORMAT_VERSION
from esm_turbo.store.requests import PrefillRequest, context_requests, deduplicate, request_of_tokens
from esm_turbo.store.usage import Usage, rates
from esm_turbo.tasks.common.context_sources import FoundContexts
from esm_turbo.tasks.common.contexts import prefill_wanted
from esm_turbo.tasks.common.forwards import protein_tokens
from esm_turbo.tasks.common.progress import Progress, silent

__all__ = ["ContextStore", "context_key", "is_store", "store_info"]

_GIB = 1 << 30
_KEY = re.compile("[0-9a-f]{64}")


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
        lock_timeout: seconds to wait for another process that is writing, or that computes a requested context,
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
        self._files = StoreFiles(self.folder, lock_timeout)
        self._budgets = {"host_bytes": host_bytes, "device_bytes": device_bytes}
        self._usage = Usage(self.folder)
        self._lookup = Lookup(host_bytes, device_bytes, self._usage)
        self._mutex = threading.RLock()
        self._model: ModelIdentity | None = None
        self._flush = weakref.finalize(self, self._usage.flush)

    def __repr__(self) -> str:
        return named(self, repr(str(self.folder)), read_only=self.read_only or None)

    def __reduce__(self) -> Any:
        """In another process, the same folder is opened, and nothing is in memory."""
        # Another process may be in another folder.
        options: dict[str, Any] = {**self._budgets, "lock_timeout": self.lock_timeout, "read_only": self.read_only}
        return partial(type(self), self.folder.absolute(), **options), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spec(self, turbo: ContextModel, config: TurboConfig | None = None) -> ContextSpec:
        """See `context_spec`; a model is probed when it is first seen, and after changes."""
        spec = context_spec(turbo, config, self._model)
        self._model = spec.identity
        return spec

    def close(self) -> None:
        """Frees the contexts in memory and writes the counts of hits. The store can still be used."""
        with self._mutex:
            self._lookup.clear()
            self._usage.flush()

    def check_model(self, turbo: ContextModel) -> None:
        """Makes sure that the store belongs to a model, or is new.

        Raises:
            ValueError: it belongs to another one.
        """
        with self._mutex:
            self._files.partition(self._spec(turbo, TurboConfig.from_preset("exact")))

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
        requests = context_requests(turbo, sequences, total_tokens, total_masks)
        return self._find(turbo, [one.key for one in requests], count_missed=True)

    def load(self, turbo: ContextModel, key: str) -> TurboKVCache | None:
        """Looks a context up by its key, see `context_key`; a cache of one row on the model's device, or None.

        What is no key finds nothing.

        Raises:
            ValueError: the store belongs to another model.
        """
        if _KEY.fullmatch(key) is None:
            return None
        return self._find(turbo, [key], count_missed=True)[0]

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
        requests = context_requests(turbo, sequences, total_tokens, total_masks)
        unique = deduplicate(requests)
        spec = self._spec(turbo)
        with self._mutex:
            partition = self._files.partition(spec)
            looked_up = {one.key: self._lookup.find(partition, one.key, turbo.model.device) for one in unique}
        found = {key: context for key, context in looked_up.items() if context is not None}
        done = {index for index, one in enumerate(unique) if one.key in found}
        # Other threads read meanwhile.
        for filled in self._fill(turbo, spec, unique, done, toks_per_batch):
            with self._mutex:
                self._usage.count("missed", len(filled.requests))
            found |= filled.contexts
        if len(requests) == 1:
            return found[requests[0].key].clone().cache(spec)
        caches = {key: context.cache(spec) for key, context in found.items()}
        # `cat` copies, so that changes of the result do not reach the contexts kept in memory.
        return TurboKVCache.cat([caches[one.key] for one in requests])

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
        requests = context_requests(turbo, sequences, total_tokens, total_masks)
        unique = deduplicate(requests)
        spec, device, hold = self._spec(turbo), turbo.model.device, self._lookup.pool.hold()
        done: set[int] = set()
        # Of contexts in memory, partitions tell the kinds apart; what is not stored is not found again.
        name = uuid.uuid4().hex
        try:
            with self._mutex:
                if (partition := self._files.partition(spec)) is not None:
                    name = partition.name
                for index, one in enumerate(unique):
                    found = self._lookup.find_held(hold, partition, one.key, device)
                    if isinstance(found, FlatContext):
                        raise self._lookup.no_room(found)
                    if found:
                        done.add(index)
            entries = {one.key: (name, one.key) for one in unique}
            for filled in self._fill(turbo, spec, unique, done, toks_per_batch):
                with self._mutex:
                    self._usage.count("missed", len(filled.requests))
                    partition = self._files.partition(spec)
                    for key, context in filled.contexts.items():
                        entries[key] = name if partition is None else partition.name, key
                        if not self._lookup.try_hold(hold, entries[key], context, device):
                            raise self._lookup.no_room(context)
            with self._mutex:
                return hold.contexts([entries[one.key] for one in requests], spec)
        except BaseException:
            hold.release()
            raise

    def find(
        self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], config: TurboConfig
    ) -> list[TurboKVCache | None]:
        """The contexts of exactly these tokens, special ones included; None for those that are not there.

        Only what is found is counted. The model is read once, see `exact_identity`.

        Args:
            turbo: the model.
            token_ids: of each row.
            config: options under which they are stored.

        Raises:
            ValueError: the store belongs to another model.
        """
        return self._find(turbo, [request_of_tokens(turbo, ids).key for ids in token_ids], config)

    def _find(
        self, turbo: ContextModel, keys: Sequence[str], config: TurboConfig | None = None, *, count_missed: bool = False
    ) -> list[TurboKVCache | None]:
        """The contexts of keys, under the model's own preset or other options; None for those that are not there."""
        spec, device = self._spec(turbo, config), turbo.model.device
        with self._mutex:
            partition = self._files.partition(spec)
            found = [self._lookup.find(partition, key, device) for key in keys]
            if count_missed:
                self._usage.count("missed", found.count(None))
            return [None if context is None else context.clone().cache(spec) for context in found]

    def keep(
        self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], cache: TurboKVCache, config: TurboConfig
    ) -> None:
        """Store computed contexts that are not there yet; a store that is read only stays as it is.

        Args:
            turbo: the model.
            token_ids: of each row, special ones included.
            cache: their contexts, as the model has just computed them, each in one call and without other totals; their
                keys and values are believed.
            config: options under which they are stored.

        Raises:
            ValueError: the cache holds other tokens, is stored otherwise or is a hold, the model has changed since it
                computed them, or the store belongs to another one.
            FolderBusyError, OSError: as of `get_or_prefill`.
        """
        with self._mutex:
            self._usage.count("missed", len(token_ids))
        if self.read_only:
            return
        spec = self._spec(turbo, config)
        if difference := cache.identity.difference(spec.identity):
            raise ValueError(f"the model has changed since it computed this: {difference}; nothing was stored")
        # What is written has to be computed before this returns: it may as well be waited for here.
        if isinstance(cache, PooledContexts):
            raise ValueError("what `hold` returned is in a store; nothing was stored")
        if cache.config != config or not _holds(turbo, cache, token_ids):
            raise ValueError("the cache does not hold these tokens under these options; nothing was stored")
        requests = [request_of_tokens(turbo, ids) for ids in token_ids]
        rows = FlatBatch.of(cache, [one.tokens for one in requests])
        computed = Computed([one.key for one in requests], rows)
        Filling(self._files, self._lookup, self._mutex, spec, turbo.model.device, lambda _: [computed]).store(requests)

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
        spec, device, hold = self._spec(turbo, config), turbo.model.device, self._lookup.pool.hold()
        entries: dict[int, tuple[str, str]] = {}
        copied: dict[int, TurboKVCache] = {}
        try:
            with self._mutex:
                partition = self._files.partition(spec)
                for number, ids in enumerate(token_ids if partition is not None else ()):
                    assert partition is not None
                    key = request_of_tokens(turbo, ids).key
                    found = self._lookup.find_held(hold, partition, key, device)
                    if isinstance(found, FlatContext):
                        copied[number] = found.clone().cache(spec)
                    elif found:
                        entries[number] = partition.name, key
                held = hold.contexts(entries.values(), spec) if entries else None
                return FoundContexts(held, tuple(entries), copied)
        except BaseException:
            hold.release()
            raise

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
            compute: computes it; returns a cache of one row.

        Raises:
            ValueError, FolderBusyError, OSError: as of `get_or_prefill`.
        """
        found = self.find(turbo, [token_ids], config)[0]
        if found is None:
            found = compute()
            self.keep(turbo, [token_ids], found, config)
        return found

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
        requests = deduplicate(context_requests(turbo, sequences, total_tokens, total_masks))
        computed = residues = 0
        with turbo.model.base_model.kv.in_call():
            spec = self._spec(turbo)
            done = self._done(spec, requests, report)
            self._files.sweep_once()
            total = sum(one.tokens - 1 for index, one in enumerate(requests) if index not in done)
            report("prefill", 0, total)
            for filled in self._fill(turbo, spec, requests, done, toks_per_batch, on_failure):
                computed += filled.computed
                residues += sum(one.tokens - 1 for one in filled.requests)
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
        spec = self._spec(turbo)

        def missing() -> Iterator[Sequence[PrefillRequest]]:
            for batch in batches:
                requests = deduplicate(context_requests(turbo, batch))
                done = self._done(spec, requests, silent)
                own = [one for index, one in enumerate(requests) if index not in done]
                # Of the caller of this method, beyond what fills the store.
                warn_if_long((one.tokens - 1 for one in own), turbo.model.family, stacklevel=5)
                yield own

        with turbo.model.base_model.kv.in_call():
            for filled in self._filling(turbo, spec, on_failure).fill(missing(), in_order=True):
                yield filled.computed

    def _refuse_read_only(self) -> None:
        if self.read_only:
            raise ValueError(f"{self.folder}: opened with `read_only`: nothing can be added")

    def _done(self, spec: ContextSpec, requests: Sequence[PrefillRequest], report: Progress) -> set[int]:
        """Indices of the contexts that are in the store, undamaged."""
        with self._mutex:
            partition = self._files.partition(spec)
        if self._files.is_unfinished():
            with self._files.locked(), self._mutex:
                self._files.discard_unfinished()
        done: set[int] = set()
        for index, one in enumerate(requests):
            with self._mutex:
                if self._lookup.read(partition, one.key) is not None:
                    done.add(index)
            if done:
                report("check", index + 1, len(requests))
        return done

    def sweep(self) -> None:
        """Remove what killed processes left half-written; what running ones write stays.

        Raises:
            ValueError: another process holds the store's lock for too long.
            OSError: a file cannot be removed.
        """
        if self.folder.exists():
            with self._files.locked():
                self._files.remove_temporaries()

    def count_missing(self, turbo: ContextModel, sequences: Sequence[str]) -> int:
        """Number of sequences whose contexts have no file; what is in the files is not read."""
        with self._mutex:
            partition = self._files.partition(self._spec(turbo))
            requests = context_requests(turbo, sequences) if sequences else []
            return sum(partition is None or not partition.path(one.key).is_file() for one in requests)

    def info(self) -> dict[str, Any]:
        """Contents and usage of the store, JSON values.

        Returns:
            `model`, its `precision` and `geometry`, `presets` (contexts and bytes on disk of each), their sums
            `contexts` and `bytes`, `memory` (contexts held by this object) and `usage` (look-ups of all processes, and
            hit rates by place).
        """
        with self._mutex:
            self._files.read_header()
            header = self._files.header
            presets = [partition.info() for partition in self._files.partitions()]
            return {
                "kind": "context_store",
                "format_version": FORMAT_VERSION,
                "model": None if header is None else header.model,
                "precision": None if header is None else header.identity.precision,
                "geometry": None if header is None else header.geometry.to_dict(),
                "presets": presets,
                "contexts": sum(preset["contexts"] for preset in presets),
                "bytes": sum(preset["bytes"] for preset in presets),
                "memory": self._lookup.info(),
                "usage": rates(self._usage.totals()),
            }

    def _fill(
        self,
        turbo: ContextModel,
        spec: ContextSpec,
        requests: Sequence[PrefillRequest],
        done: set[int],
        toks_per_batch: int | None,
        on_failure: Callable[[str, str], None] | None = None,
    ) -> Iterator[StoredBatch]:
        """Computes contexts batch by batch, without those that are `done`, and stores them unless it is read-only."""
        lengths = (one.tokens - 1 for index, one in enumerate(requests) if index not in done)
        warn_if_long(lengths, turbo.model.family, stacklevel=4)
        tokens = protein_tokens(toks_per_batch, turbo)
        batches = remaining_batches([one.tokens for one in requests], tokens, done)
        filling = self._filling(turbo, spec, on_failure)
        run = filling.compute if self.read_only else filling.fill
        with turbo.model.base_model.kv.in_call():
            yield from run([requests[index] for index in batch] for batch in batches)

    def _filling(
        self, turbo: ContextModel, spec: ContextSpec, on_failure: Callable[[str, str], None] | None
    ) -> Filling:
        def prefill(wanted: Sequence[PrefillRequest]) -> Sequence[Computed]:
            computed = prefill_wanted(turbo, on_failure, wanted)
            # Other code may have changed it since the last batch.
            spec.identity.check_unchanged()
            return computed

        return Filling(self._files, self._lookup, self._mutex, spec, turbo.model.device, prefill)


def _holds(turbo: ContextModel, cache: TurboKVCache, token_ids: Sequence[Sequence[int]]) -> bool:
    """Whether the rows of a cache hold exactly these tokens, at their positions."""
    rows, places = turbo.codes.present(token_ids)
    places = places or [list(range(len(row))) for row in rows]
    lengths, stored = cache.lengths.tolist(), cache.token_ids.tolist()
    at = [list(range(n)) for n in lengths] if cache.positions is None else cache.positions.tolist()
    held = [(ids[:n], own[:n]) for ids, own, n in zip(stored, at, lengths, strict=True)]
    return held == [(list(map(int, row)), own) for row, own in zip(rows, places, strict=True)]


def context_key(turbo: ContextModel, sequence: str | ProteinRecord) -> str:
    """The key of a sequence's context in a store: a digest of its tokens, 64 hexadecimal digits.

    Raises:
        ValueError: the sequence is invalid.
    """
    return context_requests(turbo, sequence)[0].key


def store_info(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents and usage of a store for `esm-turbo info`.

    Raises:
        ValueError: the store was written by another version, or is damaged.
    """
    info = ContextStore(folder, read_only=True).info()
    # Of this new object, which holds nothing.
    del info["memory"]
    return info
