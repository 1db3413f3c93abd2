"""Sessions, by which one forward of the model writes or reads a cache.

A session is passed through the layers as a keyword argument, so that neither the model nor the library keeps state.
RoPE is applied before: in a prefill by Hugging Face's code, in an extension by `Extension.rotate` (ops/), and in half
precision on CUDA by the packed encoder (model/packed_encoder.py) in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from esm_turbo.codecs import Packed, PackedContext
from esm_turbo.codecs.row_index import RowIndex, of_rows
from esm_turbo.kv.append import Append
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.ops import torch_ops
from esm_turbo.ops.backends import KVBackend


class KVSession(ABC):
    """Receives the queries, keys (both after RoPE) and values [batch, heads, n, head_dim] of every layer.

    Attributes:
        runs_library: whether modules run the library's functions and not those of this package that compute the same,
            since unknown code may have replaced the former.
    """

    runs_library = True

    @abstractmethod
    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        """Computes the attention output [batch, heads, n, head_dim]; None leaves it to the model's own attention."""

    def gelu(self, x: Tensor) -> Tensor:
        """Computes the activation of x [batch, n, intermediate_size], see `torch_ops.gelu`."""
        return torch_ops.gelu(x)


def attend_by(session: KVSession, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
    """`session.attend` outside of autocast, under which rotations return another dtype than linear layers."""
    query, keys = query.to(values.dtype), keys.to(values.dtype)
    device_type = values.device.type
    if not torch.is_autocast_enabled(device_type):
        return session.attend(layer_idx, query, keys, values)
    with torch.autocast(device_type, enabled=False):
        return session.attend(layer_idx, query, keys, values)


class Plain(KVSession):
    """Reads and writes no cache, and has modules of known code compute what the library's would."""

    runs_library = False

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Leaves attention to the model."""


class Prefill(KVSession):
    """Encodes the keys and values of an exact forward into an empty cache, layer by layer."""

    def __init__(self, cache: TurboKVCache, append: Append, backend: KVBackend) -> None:
        self.cache = cache
        self.append = append
        self.backend = backend

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.cache.stage(self.append, layer_idx, keys, values, self.backend)


class _Shared(NamedTuple):
    """Tensors that an extension's layers share, see `PackedContext`; masks are expanded to all rows."""

    mask: Tensor | None
    past_mask: Tensor | None
    protected_mask: Tensor | None
    visible: Tensor | None
    visible_words: Tensor | None
    lengths: Tensor
    protected_columns: Tensor
    common: dict[Any, Any]


class Extension(KVSession):
    """Lets new tokens attend to a cache and to each other.

    Args:
        cache: with one row for each of the extension's, one row shared by all, or any rows and an `index`; not changed.
        backend: computes everything that the session does.
        past_mask: which columns each row sees, bool [batch, columns]; None for all.
        mask: which new tokens are seen, bool [batch, n]; None for all.
        append: receives the new tokens; None stores none.
        visible: the columns that the caller shows to each row, bool [batch, columns]; None for all.
        index: row of the cache that each row reads; None if they are the same, or one that all share.
        lengths: of the cache's rows, if they are read only so far, int64 [rows]; None for their own.
    """

    def __init__(
        self,
        cache: TurboKVCache,
        backend: KVBackend,
        past_mask: Tensor | None,
        mask: Tensor | None,
        append: Append | None = None,
        visible: Tensor | None = None,
        index: RowIndex | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        self.cache = cache
        self.index = index
        self.lengths = cache.lengths if lengths is None else lengths
        self.backend = backend
        self.mask = mask
        self.append = append
        self.past_mask = past_mask
        self.visible = visible
        self.protected_mask: Tensor | None = None
        if cache.protected_columns.shape[1]:
            self.past_mask, self.protected_mask = _split_protected(cache, past_mask, index)
            assert cache.codec is not None
            # Of many contexts few are read.
            if index is None or cache.batch_size <= len(index):
                backend.prepare(cache.codec, [layer.protected for layer in cache.layers])
        # What all layers of a device share.
        self._shared: tuple[torch.device, _Shared] | None = None

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        layer = self.cache.layers[layer_idx]
        # A model may be spread over several devices.
        if self._shared is None or self._shared[0] != query.device:
            self._shared = query.device, self._shared_on(query.device, query.shape[0])
        shared = self._shared[1]
        context = PackedContext(
            layer.packed,
            shared.past_mask,
            layer.protected,
            shared.protected_mask,
            layer.rows,
            shared.lengths,
            shared.protected_columns,
            shared.visible,
            shared.visible_words,
            self.index,
            shared.common,
        )
        assert self.cache.codec is not None
        output = self.backend.extend_attention(query, keys, values, shared.mask, context, self.cache.codec, layer_idx)
        if self.append is not None:
            self.cache.stage(self.append, layer_idx, keys, values, self.backend)
        return output

    def _shared_on(self, device: torch.device, rows: int) -> _Shared:
        mask, past_mask, protected_mask, visible = (
            None if x is None else x.to(device).expand(rows, -1)
            for x in (self.mask, self.past_mask, self.protected_mask, self.visible)
        )
        lengths, protected_columns = self.lengths.to(device), self.cache.protected_columns.to(device)
        words = None if visible is None else self.backend.pack_mask(visible)
        return _Shared(mask, past_mask, protected_mask, visible, words, lengths, protected_columns, {})

    def rotate(self, query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Scales queries and applies RoPE, see `torch_ops.rotate`."""
        return self.backend.rotate(query, keys, cos, sin, scale)

    def gelu(self, x: Tensor) -> Tensor:
        """See `KVSession.gelu`."""
        return self.backend.gelu(x)


class PooledExtension(Extension):
    """Lets new tokens attend to contexts in a pool, slab by slab, and to each other.

    Args:
        contexts: read in place.
        backend: computes everything that the session does.
        past_mask: which columns each row sees, bool [batch, columns]; None for all.
        mask: which new tokens are seen, bool [batch, n]; None for all.
        visible: the columns that the caller shows to each row, bool [batch, columns]; None for all.
        index: the context of each row, in the order of `contexts.ranks`.
    """

    def __init__(
        self,
        contexts: PooledContexts,
        backend: KVBackend,
        past_mask: Tensor | None,
        mask: Tensor | None,
        visible: Tensor | None,
        index: RowIndex,
    ) -> None:
        self.backend = backend
        # As long as they are read, they must be held.
        self.contexts = contexts
        past_mask = index.take(contexts.valid()) if past_mask is None else past_mask
        self.parts = [
            (
                segment.rows,
                Extension(
                    segment.slab,
                    backend,
                    _with_columns(past_mask[segment.rows], segment.slab.columns),
                    None if mask is None else mask[segment.rows],
                    None,
                    None if visible is None else _with_columns(visible[segment.rows], segment.slab.columns),
                    segment.slots,
                    segment.lengths,
                ),
            )
            for segment in contexts.segments(index)
        ]

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        outputs = [part.attend(layer_idx, query[rows], keys[rows], values[rows]) for rows, part in self.parts]
        if len(outputs) == 1:
            return outputs[0]
        # Token by token, as each output lies in memory and linear layers read it.
        return torch.cat([output.transpose(1, 2) for output in outputs]).transpose(1, 2)


def _with_columns(mask: Tensor, columns: int) -> Tensor:
    """A mask with the columns of a slab, which may be more or fewer than those of the longest context."""
    return functional.pad(mask[:, :columns], (0, max(0, columns - mask.shape[1])))


class GrowingExtension(Extension):
    """An extension whose first tokens are stored after each row's own at once, for graphs.

    Args:
        cache: with room in its columns beyond each row's length.
        backend: computes everything that the session does.
        stored: number of tokens that are stored.
        store: is given the index of each layer, and what it stores of these tokens, [batch, heads, stored, ...].
    """

    def __init__(
        self, cache: TurboKVCache, backend: KVBackend, stored: int, store: Callable[[int, Packed], None]
    ) -> None:
        super().__init__(cache, backend, cache.valid(), None)
        self.stored = stored
        self.store = store

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        output = super().attend(layer_idx, query, keys, values)
        assert self.cache.codec is not None
        packed, _, _ = self.backend.encode(
            self.cache.codec,
            layer_idx,
            keys[:, :, : self.stored],
            values[:, :, : self.stored],
            start=self.cache.lengths,
            columns=self.cache.columns,
            summarize=False,
        )
        self.store(layer_idx, packed)
        return output


def _split_protected(cache: TurboKVCache, past_mask: Tensor | None, index: RowIndex | None) -> tuple[Tensor, Tensor]:
    """Splits a mask into those of packed columns, without protected tokens, and of slots, [batch, slots]."""
    columns = cache.protected_columns.long()
    if past_mask is None:
        past_mask = of_rows(cache.valid(), index)
    columns = of_rows(columns, index).expand(past_mask.shape[0], -1)
    used = columns >= 0
    columns = columns.clamp_min(0)
    protected_mask = past_mask.gather(1, columns) & used
    covered = torch.zeros_like(past_mask, dtype=torch.int32).scatter_add_(1, columns, used.to(torch.int32))
    return past_mask & (covered == 0), protected_mask
