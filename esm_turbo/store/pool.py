"""Contexts in device memory, in slots of few sizes, where extensions read them.

Memory is taken in slabs: so many slots of one size and partition, in one allocation. A context never moves from its
slot, and keeps it for as long as it is held. Others go, the least recently used first: alone, for a context of the same
size, or with all of a slab that nobody holds, for one of another size. Slots are therefore empty only in the newest
slab of a size, which is at most as large as all others of that size and an eighth of the pool, unless that is less than
a slot or a sixty-fourth of the pool. Padding is at most a third of a slot for contexts of more than 128 tokens.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esm_turbo.kv.tensors import OWN_TENSORS, Axis, axis_of, dim_of
from esm_turbo.kv_cache import PROTECTED_SLOTS
from esm_turbo.model.graphs import rounded_up
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.model.static_cache import StaticKVCache
from esm_turbo.ops.copies import ByteRows, copy_rows
from esm_turbo.store.flat import ContextSpec, FlatContext, Part, layout, total_bytes

_COLUMNS = 64
# The smallest and the largest slab, as parts of the pool, unless a single slot is larger.
_SMALLEST, _LARGEST = 64, 8

Key = tuple[str, str]
# What slots of a size have in common: device, partition, columns, and name, dtype and shape of their tensors.
_Kind = tuple[torch.device, str, int, tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]]


def slot_columns(tokens: int) -> int:
    """Columns of the slots for contexts of so many tokens: 64, 128, 192, 256, 384, 512, 768, 1,024, ..."""
    return rounded_up(tokens, _COLUMNS)


@dataclass(eq=False)
class _Slab:
    """Slots of one kind.

    Attributes:
        kind: of the slots.
        tensors: by name, with a row for each slot.
        nbytes: of all tensors.
        free: numbers of empty slots, and when those that read them last are done.
        slots: the others, by number.
        cache: of the tensors, once contexts have been held.
    """

    kind: _Kind
    tensors: dict[str, Tensor]
    nbytes: int
    free: list[tuple[int, torch.cuda.Event | None]]
    slots: dict[int, _Slot] = field(default_factory=dict)
    cache: StaticKVCache | None = None

    def is_held(self) -> bool:
        return any(slot.holds for slot in self.slots.values())

    def last_used(self) -> int:
        return max((slot.used for slot in self.slots.values()), default=0)


@dataclass(eq=False)
class _Slot:
    """A context in its slot.

    Attributes:
        key: of the context.
        slab: that it lies in.
        number: of the slot.
        parts: of the context, as it was given.
        used: number of the last use.
        holds: number of holds.
        written: when the context is there, for other streams of a CUDA device.
        read: when those that held it last are done, likewise.
    """

    key: Key
    slab: _Slab
    number: int
    parts: tuple[Part, ...]
    used: int
    holds: int = 0
    written: torch.cuda.Event | None = None
    read: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class ContextPool:
    """Contexts in the memory of devices, up to a number of bytes.

    All methods may be called from any thread.

    Args:
        budget: bytes of all slabs; 0 keeps none.

    Attributes:
        nbytes: bytes of all slabs.
        evicted: number of contexts evicted.

    Raises:
        ValueError: the budget is negative.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"a budget must be at least 0 bytes, got {budget}")
        self.budget = budget
        self.evicted = 0
        self._slabs: list[_Slab] = []
        self._slots: OrderedDict[tuple[Key, torch.device], _Slot] = OrderedDict()
        self._clock = itertools.count(1)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def get(self, key: Key, device: torch.device) -> FlatContext | None:
        """A copy of a context on a device, now the most recently used; None if it is not here."""
        with self._lock:
            slot = self._find(key, device)
            if slot is None:
                return None
            _wait(device, slot.written)
            made = FlatContext.empty(slot.parts, device)
            _copy(_first_entries(slot), made.tensors())
            return made

    def put(self, key: Key, context: FlatContext, device: torch.device) -> bool:
        """Keeps a copy of a context on a device, and evicts others to make room; False if there is none.

        Args:
            key: of the context.
            context: on any device.
            device: where it is kept.
        """
        with self._lock:
            if not self.budget:
                return False
            if self._find(key, device) is not None:
                return True
            slab = self._room(_kind_of(key[0], context, device))
            if slab is None:
                return False
            number, read = slab.free.pop()
            _wait(device, read)
            slot = _Slot(key, slab, number, context.parts, next(self._clock))
            _copy(context.to(device).tensors(), _rows_of(slot))
            slot.written = _now(device)
            slab.slots[slot.number] = slot
            self._slots[key, device] = slot
            return True

    def hold(self) -> PoolHold:
        """A new hold, of no context yet."""
        return PoolHold(self)

    def clear(self) -> None:
        """Drops all slabs in which no context is held."""
        with self._lock:
            for slab in list(self._slabs):
                if not slab.is_held():
                    self._drop(slab)

    def info(self) -> dict[str, Any]:
        """Budget and use, JSON values: `used_bytes` are those of contexts, the rest of `bytes` is padding or empty."""
        with self._lock:
            return {
                "budget": self.budget,
                "bytes": self.nbytes,
                "used_bytes": sum(slot.nbytes for slot in self._slots.values()),
                "contexts": len(self),
                "held": sum(slot.holds > 0 for slot in self._slots.values()),
                "evicted": self.evicted,
            }

    def _find(self, key: Key, device: torch.device) -> _Slot | None:
        """A context's slot, now the most recently used."""
        slot = self._slots.get((key, device))
        if slot is not None:
            self._slots.move_to_end((key, device))
            slot.used = next(self._clock)
        return slot

    def _room(self, kind: _Kind) -> _Slab | None:
        """A slab with an empty slot of a kind; None if contexts that are held leave no room."""
        while True:
            own = [slab for slab in self._slabs if slab.kind == kind]
            free = next((slab for slab in own if slab.free), None) or self._new_slab(kind, own)
            if free is not None:
                return free
            slots = (slot for slot in self._slots.values() if slot.slab.kind == kind and not slot.holds)
            oldest = next(slots, None)
            slabs = [slab for slab in self._slabs if slab.kind != kind and not slab.is_held()]
            unused = min(slabs, key=_Slab.last_used, default=None)
            if unused is not None and (oldest is None or unused.last_used() < oldest.used):
                self._drop(unused)
            elif oldest is not None:
                self._evict(oldest)
            else:
                return None

    def _new_slab(self, kind: _Kind, own: Sequence[_Slab]) -> _Slab | None:
        """A new slab of a kind, if there is room for a slot; `own` are those there are."""
        device, _, _, tensors = kind
        slot_bytes = _nbytes(tensors, 1)
        free = self.budget - self.nbytes
        wanted = min(max(sum(slab.nbytes for slab in own), self.budget // _SMALLEST), self.budget // _LARGEST, free)
        count = max(1, wanted // slot_bytes)
        if _nbytes(tensors, count) > free:
            return None
        parts = layout([(name, dtype, (count, *shape)) for name, dtype, shape in tensors])
        try:
            made = FlatContext.empty(parts, device)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            raise
        slab = _Slab(kind, made.tensors(), made.nbytes, [(number, None) for number in range(count)])
        self._slabs.append(slab)
        return slab

    def _evict(self, slot: _Slot) -> None:
        assert not slot.holds
        del self._slots[slot.key, slot.slab.kind[0]]
        del slot.slab.slots[slot.number]
        slot.slab.free.append((slot.number, slot.read))
        self.evicted += 1

    def _drop(self, slab: _Slab) -> None:
        for slot in list(slab.slots.values()):
            self._evict(slot)
        self._slabs.remove(slab)


class PoolHold:
    """Keeps contexts of a pool from eviction until they are released, or nothing refers to it any more."""

    def __init__(self, pool: ContextPool) -> None:
        self._pool = pool
        self._held: list[_Slot] = []
        self._keys: set[tuple[Key, torch.device]] = set()
        self._release = weakref.finalize(self, _let_go, pool, self._held)

    @property
    def released(self) -> bool:
        return not self._release.alive

    def release(self) -> None:
        """Lets other contexts take the slots."""
        self._release()

    def add(self, key: Key, device: torch.device) -> bool:
        """Holds a context; False if it is not in the pool."""
        with self._pool._lock:
            slot = self._pool._find(key, device)
            if slot is None:
                return False
            if (key, device) not in self._keys:
                self._keys.add((key, device))
                slot.holds += 1
                self._held.append(slot)
            return True

    @torch.no_grad()
    def contexts(self, keys: Iterable[Key], spec: ContextSpec) -> PooledContexts:
        """Contexts of one kind that are held, in any order."""
        with self._pool._lock:
            held = {slot.key: slot for slot in self._held}
            slots = [held[key] for key in keys]
            for slot in slots:
                _wait(slot.slab.kind[0], slot.written)
            slabs = list({id(slot.slab): slot.slab for slot in slots}.values())
            for slab in slabs:
                if slab.cache is None:
                    slab.cache = StaticKVCache.from_tensors(
                        spec.config, spec.geometry, spec.identity, spec.codec, slab.tensors
                    )
            numbers = {id(slab): number for number, slab in enumerate(slabs)}
            places = [(numbers[id(slot.slab)], slot.number) for slot in slots]
            return PooledContexts.of([slab.cache for slab in slabs if slab.cache is not None], places, self)


def _let_go(pool: ContextPool, held: list[_Slot]) -> None:
    # Whoever lets go has read on its current stream; the next context may be written on another one.
    with pool._lock:
        done = {device: _now(device) for device in {slot.slab.kind[0] for slot in held}}
        for slot in held:
            slot.holds -= 1
            slot.read = done[slot.slab.kind[0]]


def _now(device: torch.device) -> torch.cuda.Event | None:
    """An event that marks the work queued so far on the current stream of a CUDA device."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _wait(device: torch.device, event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _kind_of(partition: str, context: FlatContext, device: torch.device) -> _Kind:
    tokens = next(part.shape[1] for part in context.parts if part.name == "token_ids")
    columns = slot_columns(tokens)
    protects = any(axis_of(part.name) is Axis.SLOT and part.name not in OWN_TENSORS for part in context.parts)
    sizes = {Axis.COLUMN: columns, Axis.SLOT: PROTECTED_SLOTS if protects else 0}
    tensors = []
    for part in context.parts:
        shape, axis = list(part.shape[1:]), axis_of(part.name)
        if axis in sizes:
            shape[dim_of(part.name) - 1] = sizes[axis]
        tensors.append((part.name, part.dtype, tuple(shape)))
    return device, partition, columns, tuple(tensors)


def _nbytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], count: int) -> int:
    return total_bytes(layout([(name, dtype, (count, *shape)) for name, dtype, shape in tensors]))


def _rows_of(slot: _Slot) -> dict[str, Tensor]:
    """The tensors of a slot, with all of its columns."""
    return {name: tensor[slot.number : slot.number + 1] for name, tensor in slot.slab.tensors.items()}


def _first_entries(slot: _Slot) -> dict[str, Tensor]:
    """The tensors of a context in its slot."""
    rows = _rows_of(slot)
    return {part.name: rows[part.name][tuple(map(slice, part.shape))] for part in slot.parts}


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Copies a context's tensors to the beginning of others, the rest of which becomes zero, or empty slots."""
    for name in target.keys() & OWN_TENSORS.keys():
        target[name].fill_(-1 if name == "protected_columns" else 0)
        target[name][tuple(map(slice, source[name].shape))] = source[name]
    # Apart from the others, whose rows of single bytes would have everything copied byte by byte.
    names = [name for name in target if name not in OWN_TENSORS]
    dims = [dim_of(name) for name in names]
    copy_rows(ByteRows([source[name] for name in names], dims), ByteRows([target[name] for name in names], dims))
