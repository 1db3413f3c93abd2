"""Encoding, attention over packed contexts and RoPE in PyTorch: the path of CPU and MPS, and the fallback on CUDA."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from esm_turbo.codecs import KVCodec, Packed, PackedContext
from esm_turbo.codecs.row_index import Group

__all__ = ["encode", "extend_attention", "gelu", "rotate", "take_tokens"]

# Elements of a decoded slice: two megabytes in float32, small enough for a processor's caches, large enough that the
# time to start operations does not count.
_SLICE_ELEMENTS = 2**19
# Bounds of a slice in tokens. The upper one keeps small models from decoding whole contexts at once.
_SLICE_TOKENS = (16, 512)
# Queries of a context from which it is decoded as a whole, on a CPU: PyTorch's attention, which keeps no scores, then
# takes a ninth of the time for ten thousand queries, a quarter for a thousand and a half for two hundred.
_DECODED_QUERIES = 128
_LOWEST = -1e30


def encode(
    codec: KVCodec,
    layer_idx: int,
    keys: Tensor,
    values: Tensor,
    *,
    order: Tensor | None = None,
    start: Tensor | None = None,
    columns: int | None = None,
    counts: Tensor | None = None,
    protected: Tensor | None = None,
    summarize: bool = True,
    counters: Tensor | None = None,
) -> tuple[Packed, Packed, Packed]:
    """Encodes one layer's keys and values: `transform`, `quantize` and `summarize` of a codec.

    Shapes: B batch, H heads, L tokens, D `head_dim`, P slots.

    Args:
        codec: encodes.
        layer_idx: which layer.
        keys: after RoPE, [B, H, L, D], any floating dtype.
        values: of the same tokens.
        order: index of the token stored at each offset, int64 [B, L]; None for the order given.
        start: column of each row's first new token, int64 [B]; None for 0.
        columns: upper bound of the tokens' columns, for kernels that keep a table of angles.
        counts: number of ordered tokens that are kept per row, int64 [B]; None for all.
        protected: ordered tokens, distinct and kept, that are also stored unquantised, int64 [B, P], -1 for none.
        summarize: whether to compute what is stored per row.
        counters: scratch for kernels.

    Returns:
        Packed tensors [B, H, L, ...]; keys and values of the protected tokens, bfloat16 [B, H, P, D], empty without
        `protected`; what is stored per row, [B, H, 1, ...], empty without `summarize`.
    """
    if order is not None:
        keys, values = take_tokens(keys, order), take_tokens(values, order)
    unquantised: Packed = {}
    if protected is not None:
        slots = protected.clamp_min(0)
        # Relative to the first block, whatever their columns, so that one mapped query serves all of them.
        mapped = codec.transform(
            layer_idx, take_tokens(keys, slots), take_tokens(values, slots), torch.zeros_like(slots)
        )
        unquantised = {name: x.to(torch.bfloat16) for name, x in zip(("keys", "values"), mapped, strict=True)}
    steps = torch.arange(keys.shape[2], device=keys.device)
    first = 0 if start is None else start[:, None]
    keys, values = codec.transform(layer_idx, keys, values, (first + steps).expand(len(keys), -1))
    packed = codec.quantize(layer_idx, keys, values)
    if not summarize:
        return packed, unquantised, {}
    read = (steps < (len(steps) if counts is None else counts[:, None])).expand(len(keys), -1)
    if protected is not None:
        read = read & ~(steps[:, None] == protected[:, None]).any(dim=2)
    return packed, unquantised, codec.summarize(layer_idx, keys, values, packed, read)


def take_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """x [B, H, n, D] at tokens [B, m], giving [B, H, m, D]."""
    return x.gather(2, tokens[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


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

    The context is decoded slice by slice in the codec's space, and the slices are combined by online softmax (Milakov
    and Gimelshein 2018). Attention among the new tokens is merged in at the end by log-sum-exp.

    Args:
        query: of the new tokens, after RoPE and scaling, [B, H, n, D].
        keys: of the new tokens, after RoPE, [B, H, n, D].
        values: of the new tokens, [B, H, n, D].
        mask: which new tokens are seen, bool [B, n]; None for all.
        context: one layer of the cache.
        codec: decodes it.
        layer_idx: which layer.

    Returns:
        [B, H, n, D], in the query's dtype; zeros for a row that sees nothing.
    """
    new = _OnlineSoftmax(query)
    new.add_scores(query.float()[:, :, None], None, keys.float(), mask)
    new.add_values(values.float())
    new_output, new_lse = new.finish(query.shape)
    parts = [_attend_past(query[rows], read, codec, layer_idx) for rows, read in _contexts(context)]
    past = [part for part in parts if part is not None]
    if not past:
        return new_output.to(query.dtype)
    past_output, past_lse = past[0] if len(past) == 1 else map(torch.cat, zip(*past, strict=True))
    highest = torch.maximum(past_lse, new_lse).clamp_min(_LOWEST)
    past_weight, new_weight = torch.exp(past_lse - highest), torch.exp(new_lse - highest)
    total = (past_weight + new_weight).clamp_min(torch.finfo(torch.float32).tiny)
    output = (past_output * past_weight + new_output * new_weight) / total
    return output.to(query.dtype)


def _contexts(context: PackedContext) -> list[tuple[slice, PackedContext]]:
    """Groups that are attended to at once: rows, and the contexts that they read. With an index, one context each."""
    if context.index is None:
        return [(slice(None), context)]
    return [(slice(group.start, group.stop), _read_by(context, group)) for group in context.index.groups]


def _read_by(context: PackedContext, group: Group) -> PackedContext:
    """The one context that a group of rows reads, as these rows read it."""
    own, rows = slice(group.context, group.context + 1), slice(group.start, group.stop)
    columns = next(iter(context.packed.values())).shape[2]
    lengths = context.lengths
    # On a device a length would have to be waited for; columns beyond it are masked.
    if lengths is not None and lengths.device.type == "cpu":
        columns = max(1, int(lengths[group.context]))
    return replace(
        context,
        packed={name: tensor[own, :, :columns] for name, tensor in context.packed.items()},
        mask=None if context.mask is None else context.mask[rows, :columns],
        protected={name: tensor[own] for name, tensor in context.protected.items()},
        protected_mask=None if context.protected_mask is None else context.protected_mask[rows],
        rows={name: tensor[own] for name, tensor in context.rows.items()},
        index=None,
    )


def _attend_past(query: Tensor, context: PackedContext, codec: KVCodec, layer_idx: int) -> tuple[Tensor, Tensor] | None:
    """Attention to the context alone: float32 [B, H, n, D], and log-sum-exp [B, H, n, 1]; None if it is empty."""
    rows, _, stored = next(iter(context.packed.values())).shape[:3]
    folded = _fold(query.float(), rows)
    has_protected = bool(context.protected) and context.protected["keys"].shape[2] > 0
    # The kernel has no gradient of the log-sum-exp.
    sees_all = context.mask is None and not has_protected and not query.requires_grad
    if query.device.type == "cpu" and stored and folded.shape[2] >= _DECODED_QUERIES and sees_all:
        keys, values = (x.float() for x in codec.decode(layer_idx, context.packed | context.rows))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = attend(folded, keys, values, scale=1.0)
        return _unfold(output, query.shape), _unfold(lse[..., None], query.shape)
    past = _OnlineSoftmax(folded)
    if has_protected:
        mapped = codec.map_query(layer_idx, folded)
        past.add_scores(*mapped, context.protected["keys"].float(), context.protected_mask)
        past.add_values(context.protected["values"].float())
    mapped_blocks = None
    for columns, blocks in _slices(context.packed, max(folded.shape[2:]), codec.block_size):
        if blocks != mapped_blocks:
            mapped, mapped_blocks = codec.map_query(layer_idx, folded, *blocks), blocks
        tokens = {name: tensor[:, :, columns] for name, tensor in context.packed.items()} | context.rows
        visible = None if context.mask is None else context.mask[:, columns]
        # The decoded keys are freed before the values are decoded.
        past.add_scores(*mapped, codec.unpack(layer_idx, "key", tokens), visible)
        past.add_values(codec.unpack(layer_idx, "value", tokens))
    if past.acc is None:
        return None
    output, lse = past.finish(query.shape)
    return codec.unmap_output(layer_idx, output), lse


class _OnlineSoftmax:
    """Attention accumulated over slices of keys and values, float32.

    Args:
        query: [C, H, N, D]; if one context serves B rows, N counts the queries of all rows.

    Attributes:
        max: largest score so far, [C, H, N, 1].
        total: sum of exponentials relative to `max`, [C, H, N, 1].
        acc: sum of values weighted likewise, [C, H, N, D'], or None.
    """

    def __init__(self, query: Tensor) -> None:
        self.max = torch.full((*query.shape[:3], 1), _LOWEST, dtype=torch.float32, device=query.device)
        self.total = torch.zeros_like(self.max)
        self.acc: Tensor | None = None

    def add_scores(self, query: Tensor, offset: Tensor | None, keys: Tensor, mask: Tensor | None) -> None:
        """Adds the scores of a slice; `add_values` adds its values.

        Args:
            query: one for each of the slice's b blocks, [C, H, b, N, D].
            offset: added to the scores, [C, H, b, N, 1] or None.
            keys: [C, H, l, D], b blocks of equal length.
            mask: bool [B, l]; None for all.
        """
        scores = query @ keys.unflatten(2, (query.shape[2], -1)).transpose(3, 4)
        if offset is not None:
            scores += offset
        scores = scores.transpose(2, 3).flatten(3)
        if mask is not None:
            scores = scores.masked_fill_(~self._expand(mask), float("-inf"))
        new_max = torch.maximum(self.max, scores.amax(dim=3, keepdim=True))
        self.weights = scores.sub_(new_max).exp_()
        self.rescale = torch.exp(self.max - new_max)
        self.max = new_max
        self.total = self.total * self.rescale + self.weights.sum(dim=3, keepdim=True)

    def add_values(self, values: Tensor) -> None:
        """Adds the values [C, H, l, D'] of the slice whose scores were added last."""
        new = self.weights @ values
        self.acc = new if self.acc is None else torch.addcmul(new, self.acc, self.rescale)

    def finish(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The weighted mean [B, H, n, D'] and the log of the sum of exponentials [B, H, n, 1]."""
        assert self.acc is not None
        output = self.acc / self.total.clamp_min(torch.finfo(torch.float32).tiny)
        return _unfold(output, shape), _unfold(self.max + self.total.log(), shape)

    def _expand(self, mask: Tensor) -> Tensor:
        """mask [B, l] as [C, 1, N, l], or as [C, 1, 1, l] if all queries of a row share it."""
        rows, queries = self.max.shape[0], self.max.shape[2]
        if mask.shape[0] == rows:
            return mask[:, None, None, :]
        return mask.repeat_interleave(queries // mask.shape[0], dim=0)[None, None]


def _slices(packed: Packed, width: int, block_size: int | None) -> list[tuple[slice, tuple[int, int]]]:
    """Slices of the columns that fit a processor's caches when decoded, each of whole blocks or within one.

    Args:
        packed: tensors [C, H, L, ...].
        width: elements per token and head, of keys or of scores.
        block_size: of the codec, a power of two, or None.

    Returns:
        Per slice its columns, its first block and its number of blocks.
    """
    rows, heads, columns = next(iter(packed.values())).shape[:3]
    fewest, most = _SLICE_TOKENS
    step = min(most, max(fewest, _SLICE_ELEMENTS // (rows * heads * width)))
    if block_size is None:
        return [(part, (0, 1)) for part in _even_slices(columns, step)]
    if step < block_size:
        step = 1 << step.bit_length() - 1
        starts = range(0, columns, step)
        return [(slice(start, min(start + step, columns)), (start // block_size, 1)) for start in starts]
    whole = columns // block_size
    parts = [
        (slice(part.start * block_size, part.stop * block_size), (part.start, part.stop - part.start))
        for part in _even_slices(whole, step // block_size)
    ]
    if columns % block_size:
        parts.append((slice(whole * block_size, columns), (whole, 1)))
    return parts


def _even_slices(total: int, step: int) -> list[slice]:
    """As few slices as `step` allows, of about the same length: a short last one would cost as much as the others."""
    count = math.ceil(total / step)
    bounds = [index * total // count for index in range(count + 1)] if count else []
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _fold(query: Tensor, rows: int) -> Tensor:
    """[B, H, n, D] as [rows, H, N, D], so that one cached row serves all queries at once."""
    batch_size, heads, n, head_dim = query.shape
    if rows == batch_size:
        return query
    return query.transpose(0, 1).reshape(1, heads, batch_size * n, head_dim)


def _unfold(x: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of `_fold` for a result [rows, H, N, d]."""
    if x.shape[0] == shape[0] and x.shape[2] == shape[2]:
        return x
    return x.view(x.shape[1], shape[0], shape[2], x.shape[3]).transpose(0, 1)


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scales queries and rotates queries and keys by their positions, as the model does (RoPE, Su et al. 2021).

    Args:
        query: [B, H, n, D].
        keys: [B, H, n, D].
        cos: cosines of each position's angles, repeated for both halves of a head, [B or 1, n, D].
        sin: sines, likewise.
        scale: of the queries.

    Returns:
        Queries and keys, in their dtype; products are float32.
    """
    cos, sin = cos[:, None], sin[:, None]
    query, keys = (_rotated(x, cos, sin) for x in (query * scale, keys))
    return query, keys


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """The model's activation (Hendrycks and Gimpel 2016), step by step as the model computes it.

    Without gradients in one new tensor, which takes a third of the time on a CPU; subnormal numbers aside, bits are the
    same.
    """
    if torch.is_grad_enabled():
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return (x / math.sqrt(2.0)).erf_().add_(1.0).mul_(0.5).mul_(x)
