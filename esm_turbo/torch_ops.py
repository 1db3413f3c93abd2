"""Attention over packed contexts in PyTorch: the path of CPU and MPS, and the fallback on CUDA."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .codecs import KVCodec, Packed, PackedContext

__all__ = ["extend_attention"]

# Elements of a decoded slice: a megabyte in float32, which stays in the caches of one or two cores.
_SLICE_ELEMENTS = 2**18
_MIN_SLICE_TOKENS = 16
_LOWEST = -1e30


def extend_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    context: PackedContext,
    codec: KVCodec,
    layer_idx: int,
) -> Tensor:
    """Attention of new tokens to a packed context and to each other.

    The context is decoded block by block in the codec's space and merged by online softmax (Milakov and Gimelshein
    2018); the attention among the new tokens joins at the end by log-sum-exp.

    Args:
        query: of the new tokens, after RoPE and scaling, [B, H, n, D].
        keys: of the new tokens, after RoPE, [B, H, n, D].
        values: of the new tokens, [B, H, n, D].
        mask: which new tokens are seen, bool [B, n]; None for all.
        context: one layer of the cache.
        codec: reads it.
        layer_idx: which layer.

    Returns:
        [B, H, n, D], in the query's dtype. A row that sees nothing at all gets zeros.
    """
    rows = next(iter(context.packed.values())).shape[0]
    folded = _fold(query.float(), rows)
    mapped, offset = codec.map_query(layer_idx, folded)
    past = _PartialAttention(folded)
    if context.protected and context.protected["keys"].shape[2]:
        protected = context.protected["keys"].float(), context.protected["values"].float()
        past.add(mapped, offset, *protected, context.protected_mask)
    block = 0
    for columns in _slices(context.packed, max(folded.shape[2:]), codec.block_size):
        if codec.block_size is not None and columns.start // codec.block_size != block:
            block = columns.start // codec.block_size
            mapped, offset = codec.map_query(layer_idx, folded, block)
        tokens = {name: tensor[:, :, columns] for name, tensor in context.packed.items()} | context.rows
        visible = None if context.mask is None else context.mask[:, columns]
        keys_read, values_read = codec.dequantize_keys(layer_idx, tokens), codec.dequantize_values(layer_idx, tokens)
        past.add(mapped, offset, keys_read, values_read, visible)
    new = _PartialAttention(query)
    new.add(query.float(), None, keys.float(), values.float(), mask)
    new_output, new_lse = new.finish(query.shape)
    if past.sum is None:
        return new_output.to(query.dtype)
    past_output, past_lse = past.finish(query.shape)
    past_output = codec.unmap_output(layer_idx, past_output)

    highest = torch.maximum(past_lse, new_lse).clamp_min(_LOWEST)
    past_weight, new_weight = torch.exp(past_lse - highest), torch.exp(new_lse - highest)
    total = (past_weight + new_weight).clamp_min(torch.finfo(torch.float32).tiny)
    output = (past_output * past_weight + new_output * new_weight) / total
    return output.to(query.dtype)


class _PartialAttention:
    """Online softmax over blocks of keys and values, float32.

    Args:
        query: [C, H, N, D]; where a context of one row serves B rows, N holds all rows' queries.
    """

    def __init__(self, query: Tensor) -> None:
        self.highest = torch.full((*query.shape[:3], 1), _LOWEST, device=query.device)
        self.total = torch.zeros_like(self.highest)
        self.sum: Tensor | None = None

    def add(self, query: Tensor, offset: Tensor | None, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Adds keys [C, H, l, D] and values [C, H, l, D'] to what query [C, H, N, D] has seen.

        `offset` [C, H, N, 1] is added to its scores; mask is bool [B, l].
        """
        scores = query @ keys.transpose(2, 3)
        if offset is not None:
            scores += offset
        if mask is not None:
            scores = scores.masked_fill_(~self._spread(mask), float("-inf"))
        highest = torch.maximum(self.highest, scores.amax(dim=3, keepdim=True))
        weights = scores.sub_(highest).exp_()
        keep = torch.exp(self.highest - highest)
        self.highest = highest
        self.total = self.total * keep + weights.sum(dim=3, keepdim=True)
        new = weights @ values
        self.sum = new if self.sum is None else torch.addcmul(new, self.sum, keep)

    def finish(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The weighted mean [B, H, n, D'] and the log of the sum of exponentials [B, H, n, 1]."""
        assert self.sum is not None
        output = self.sum / self.total.clamp_min(torch.finfo(torch.float32).tiny)
        return _unfold(output, shape), _unfold(self.highest + self.total.log(), shape)

    def _spread(self, mask: Tensor) -> Tensor:
        """mask [B, l] as [C, 1, N, l], or [C, 1, 1, l] where all queries of a row share it."""
        rows, queries = self.highest.shape[0], self.highest.shape[2]
        if mask.shape[0] == rows:
            return mask[:, None, None, :]
        return mask.repeat_interleave(queries // mask.shape[0], dim=0)[None, None]


def _slices(packed: Packed, width: int, block_size: int | None) -> list[slice]:
    """Slices of the columns, none across a block of the codec's, such that a slice decoded stays in the cache.

    Args:
        packed: tensors [C, H, L, ...].
        width: elements that a token and head makes, of keys or of scores.
        block_size: of the codec, a power of two, or None.
    """
    rows, heads, columns = next(iter(packed.values())).shape[:3]
    step = max(_MIN_SLICE_TOKENS, _SLICE_ELEMENTS // (rows * heads * width))
    if block_size is not None:
        step = min(block_size, 1 << step.bit_length() - 1)
    else:
        # Evenly, or the last slice might be a few tokens that cost as much as a whole one.
        count = math.ceil(columns / step) or 1
        step = math.ceil(columns / count) or 1
    return [slice(start, min(start + step, columns)) for start in range(0, columns, step)]


def _fold(query: Tensor, rows: int) -> Tensor:
    """[B, H, n, D] as [rows, H, N, D]: one cached row serves all queries at once."""
    batch_size, heads, n, head_dim = query.shape
    if rows == batch_size:
        return query
    return query.transpose(0, 1).reshape(1, heads, batch_size * n, head_dim)


def _unfold(x: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of `_fold` for a result [rows, H, N, d]."""
    if x.shape[0] == shape[0] and x.shape[2] == shape[2]:
        return x
    return x.view(x.shape[1], shape[0], shape[2], x.shape[3]).transpose(0, 1)
