"""Rows that grow by a token at a time, in columns allocated ahead, by captured steps.

A step runs the last tokens of every row and a mask after them, and stores the first of these tokens. All that it reads
and writes lies on the device, so that steps follow each other without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from esm_turbo.codecs import Packed
from esm_turbo.codecs.transfers import to_device
from esm_turbo.kv.tensors import Axis, axis_of, dim_of
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.cache_engine import CacheEngine
from esm_turbo.model.family_encoder import FamilyEncoder
from esm_turbo.model.packing import Packing
from esm_turbo.model.plan import ForwardInputs, ForwardPlan
from esm_turbo.model.static_cache import StaticKVCache, layer_rows

# Tensors begin at multiples of this number of bytes, as kernels assume.
_ALIGNMENT = 256


Store = Callable[[int, Packed], None]
"""Is given the index of each layer, and what it stores of new tokens, [batch, heads, stored, ...]."""


class StepKind(NamedTuple):
    """Numbers of a step.

    Attributes:
        tokens: that run per row, with the mask.
        stored: of these, from the first on, that are stored.
    """

    tokens: int
    stored: int


class StepRunner(Protocol):
    """The part of an `Executor` that graphs need: see there."""

    encoder: FamilyEncoder
    kv: CacheEngine

    def plan(self, inputs: ForwardInputs, cache: TurboKVCache | None) -> ForwardPlan: ...

    def run(self, plan: ForwardPlan) -> Any: ...

    def fill(self, cache: TurboKVCache, inputs: ForwardInputs, packing: Packing) -> Any: ...

    def run_tail(self, cache: TurboKVCache, kind: StepKind, store: Store, counts: tuple[Tensor, Tensor]) -> Tensor: ...


class Growth:
    """Captured steps over a static cache.

    Args:
        executor: runs them.
        cache: how rows are stored.
        rows: most rows to come.
        columns: tokens of the longest row to come, and one for the mask after it.
        kinds: of steps.

    Attributes:
        contexts: the rows.
        alone: what a replay has to happen within, as graphs share memory.
        read: what must be kept alive.
    """

    read: list[Any]

    def __init__(
        self, executor: StepRunner, cache: TurboKVCache, rows: int, columns: int, kinds: Sequence[StepKind]
    ) -> None:
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext
        self.contexts = StaticKVCache.like(cache, max(columns, cache.columns), rows)
        self._kinds = kinds
        self._executor = executor
        self._writer = _ColumnWriter(self.contexts)
        device = self.contexts.device
        # Some rows that can run every kind of step.
        self._known = torch.full((rows,), max(kind.tokens for kind in kinds), device=device)
        self._masks = torch.zeros_like(self._known)
        encoder = executor.encoder
        self._states = torch.zeros(rows, encoder.config.hidden_size, dtype=encoder.dtype, device=device)
        self._replays: dict[StepKind, Callable[[], Tensor]] = {}

    @property
    def caches(self) -> list[TurboKVCache]:
        """All caches that the graphs hold."""
        return [self.contexts]

    def capture(self, capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]) -> None:
        """Capture a step of each kind."""
        self._replays = {kind: capture(partial(self.run, kind)) for kind in self._kinds}

    def run(self, kind: StepKind) -> Tensor:
        """Run a step of a kind; this is what is captured."""
        lengths = self.contexts.lengths
        # A repeated step computes the same: warming up before a capture changes nothing.
        lengths.copy_(self._known - (kind.tokens - 1))
        store = self._writer.at(lengths[:, None] + torch.arange(kind.stored, device=lengths.device))
        counts = (self._known + 1, self._masks + 1)
        self._states.copy_(self._executor.run_tail(self.contexts, kind, store, counts))
        lengths.add_(kind.stored)
        return self._states

    @torch.no_grad()
    def load(
        self, cache: TurboKVCache, token_ids: Tensor, known: Tensor, masks: Tensor, positions: Tensor | None
    ) -> None:
        """Loads rows.

        Args:
            cache: with at least the tokens of each row that the first step does not run.
            token_ids: of each row, on the CPU, [batch, n]; anything beyond its own.
            known: number of tokens of each row, on the CPU, [batch].
            masks: number of masks among them, on the CPU, [batch].
            positions: of all columns to come, on the CPU, [batch, columns]; None if `cache` stores none.
        """
        batch_size = len(known)
        self.contexts.load_(cache, layer_rows(cache)[1])
        # Rows that are left over run as well, and must find numbers.
        self._known.fill_(int(known.min()))
        self._masks.zero_()
        self._known[:batch_size] = _like(known, self._known)
        self._masks[:batch_size] = _like(masks, self._masks)
        self.contexts.token_ids[:batch_size, : token_ids.shape[1]] = _like(token_ids, self.contexts.token_ids)
        if positions is not None:
            assert self.contexts.positions is not None
            self.contexts.positions[:batch_size, : positions.shape[1]] = _like(positions, self.contexts.positions)

    @torch.no_grad()
    def step(self, kind: StepKind) -> Tensor:
        """Hidden states of a mask after each row, [rows, hidden_size]; the next step overwrites them."""
        with self.alone():
            return self._replays[kind]()

    @torch.no_grad()
    def push(self, tokens: Tensor) -> None:
        """Appends a token to each row, integers [batch]; a later step runs and stores it."""
        batch_size = len(tokens)
        column = self._known[:batch_size, None]
        self.contexts.token_ids[:batch_size].scatter_(1, column, tokens[:, None].to(torch.uint8))
        self._known.add_(1)

    @torch.no_grad()
    def copy(self, batch_size: int, columns: int) -> TurboKVCache:
        """The first rows, and as many columns as the longest of them has stored, as a cache of their own."""
        contexts = self.contexts
        tensors = {}
        for name, tensor in contexts.named_tensors():
            part = tensor[:batch_size]
            tensors[name] = (part.narrow(dim_of(name), 0, columns) if axis_of(name) is Axis.COLUMN else part).clone()
        assert contexts.codec is not None
        return TurboKVCache.from_tensors(contexts.config, contexts.geometry, contexts.identity, contexts.codec, tensors)


class _ColumnWriter:
    """Writes what layers store per column, each layer's tensors in one buffer, by one write per layer.

    Args:
        contexts: whose tensors are replaced by zeros.
    """

    def __init__(self, contexts: StaticKVCache) -> None:
        self._contexts = contexts
        self._buffers: list[Tensor] = []
        self._sizes: list[tuple[int, ...]] = []
        # By the sizes of columns, in bytes: for every byte of a column, where the first column has it, and the size.
        self._bytes: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        for layer in contexts.layers:
            tensors = layer.packed.values()
            lengths = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors]
            buffer = torch.zeros(sum(lengths), dtype=torch.uint8, device=contexts.device)
            parts = dict(zip(layer.packed, buffer.split(lengths), strict=True))
            layer.packed = {
                name: parts[name][: x.nbytes].view(x.dtype).view(x.shape) for name, x in layer.packed.items()
            }
            sizes = tuple(x.shape[3:].numel() * x.element_size() for x in tensors)
            if sizes not in self._bytes:
                starts = accumulate(lengths[:-1], initial=0)
                first = [start + byte for start, size in zip(starts, sizes, strict=True) for byte in range(size)]
                step = [size for size in sizes for _ in range(size)]
                self._bytes[sizes] = (
                    torch.tensor(first, device=contexts.device),
                    torch.tensor(step, device=contexts.device),
                )
            self._buffers.append(buffer)
            self._sizes.append(sizes)
        # They would keep what has been replaced.
        contexts.descriptions.clear()

    def at(self, columns: Tensor) -> Callable[[int, Packed], None]:
        """Stores each layer's tensors of new tokens, [rows, heads, m, ...], at columns [rows, m]."""
        contexts = self._contexts
        rows, heads = contexts.batch_size, contexts.geometry.num_heads
        row = torch.arange(rows * heads, device=columns.device).view(rows, heads, 1)
        column = (row * contexts.columns + columns[:, None])[..., None]
        indices = {sizes: (first + step * column).flatten() for sizes, (first, step) in self._bytes.items()}

        def store(layer_idx: int, packed: Packed) -> None:
            # Refinements that have been dropped stay dropped.
            kept = contexts.layers[layer_idx].packed
            new = torch.cat([packed[name].to(x.dtype).view(torch.uint8) for name, x in kept.items()], dim=3)
            self._buffers[layer_idx].scatter_(0, indices[self._sizes[layer_idx]], new.flatten())

        return store


def _like(values: Tensor, target: Tensor) -> Tensor:
    """Values on the host in the dtype and on the device of a target, without waiting for the device."""
    return to_device(values.to(target.dtype), target.device)
