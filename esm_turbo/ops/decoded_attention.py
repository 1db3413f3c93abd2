"""Attention to a context that is decoded first, on CUDA: by PyTorch's attention, and a kernel for the new tokens.

The kernels of packed contexts decode a tile for every 16 queries. Where many rows share a context it is cheaper to
decode it once, in the model's dtype. A context at full precision needs no decoding at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs import ExactCodec, KVCodec, PackedContext
from esm_turbo.ops.triton_encoder import flash_attention
from esm_turbo.ops.triton_launch import Options, empty_by_token, interpreted, launch, operator, placeholder, strides
from esm_turbo.ops.triton_layout import next_power_of_two

__all__ = ["attend_new", "decode", "extend_attention", "pays"]

# Queries from which decoding a shared context is faster, measured on an H200.
_MIN_QUERIES = 2048
_HALF = (torch.float16, torch.bfloat16)
# Tokens per tile of `attend_new`.
_TILE = 32
# Alignment of a row of the bias, in elements.
_ALIGNMENT = 8


def pays(query: Tensor, context: PackedContext, codec: KVCodec) -> bool:
    """Whether to decode the context: it is exact, or many queries share it and hide none of its columns."""
    if query.device.type != "cuda":
        return False
    contexts = 1 if context.index is None else len(context.index.groups)
    whole = _is_shared(context) if context.index is None else _reads_whole_contexts(query, context)
    if isinstance(codec, ExactCodec):
        return whole or context.index is None
    return whole and query.dtype in _HALF and query.shape[0] * query.shape[2] >= _MIN_QUERIES * contexts


def extend_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    context: PackedContext,
    codec: KVCodec,
    layer_idx: int,
) -> Tensor:
    """See `torch_ops.extend_attention`."""
    if context.index is not None:
        past, lse = _attend_named(query, context, codec, layer_idx)
        return attend_new(query, keys, values, mask, past, lse)
    past_keys, past_values = decode(codec, layer_idx, context, query.dtype)
    if _is_shared(context) and query.dtype in _HALF:
        assert context.lengths is not None
        past, lse = _attend_shared(query, past_keys, past_values, context.lengths)
    else:
        past, lse = _attend_masked(query, past_keys, past_values, _visible_columns(context, past_keys.shape[2]))
    return attend_new(query, keys, values, mask, past, lse)


def _is_shared(context: PackedContext) -> bool:
    """Whether there is one context, of which every row sees all tokens."""
    one = len(next(iter(context.packed.values()))) == 1
    return one and context.lengths is not None and context.visible is None


def _reads_whole_contexts(query: Tensor, context: PackedContext) -> bool:
    """Whether flash attention can read the contexts that rows name: in half precision, with nothing hidden."""
    return query.dtype in _HALF and context.lengths is not None and context.visible is None


def decode(codec: KVCodec, layer_idx: int, context: PackedContext, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer of a context, in the model's coordinates, [C, H, L, D] each."""
    if isinstance(codec, ExactCodec):
        return context.packed["keys"].to(dtype), context.packed["values"].to(dtype)
    keys, values = codec.decode(layer_idx, context.packed | context.rows)
    if context.protected and context.protected_columns is not None:
        # Stored relative to the first block, whatever their columns.
        first = torch.zeros_like(context.protected_columns)
        exact_keys, exact_values = codec.inverse_transform(
            layer_idx, context.protected["keys"], context.protected["values"], first
        )
        steps = torch.arange(keys.shape[2], device=keys.device)
        for slot, column in enumerate(context.protected_columns.unbind(1)):
            here = (steps == column[:, None])[:, None, :, None]
            keys = torch.where(here, exact_keys[:, :, slot : slot + 1], keys)
            values = torch.where(here, exact_values[:, :, slot : slot + 1], values)
    return keys.to(dtype), values.to(dtype)


def _visible_columns(context: PackedContext, columns: int) -> Tensor:
    """Which columns each row sees, bool [B or C, L]."""
    if context.lengths is None:
        device = next(iter(context.packed.values())).device
        return torch.ones(1, columns, dtype=torch.bool, device=device) if context.mask is None else context.mask
    valid = torch.arange(columns, device=context.lengths.device) < context.lengths[:, None]
    return valid if context.visible is None else valid & context.visible


def _attend_shared(query: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of all rows to one context; the rows' tokens are one sequence for flash attention.

    Returns:
        [B, H, n, D], and log-sum-exp, float32 [B, H, n].
    """
    batch_size, _, n, _ = query.shape
    tokens = query.transpose(1, 2).flatten(0, 1)
    bounds = torch.arange(2, dtype=torch.int32, device=query.device) * len(tokens)
    ends = torch.nn.functional.pad(length.to(torch.int32), (1, 0))
    output, lse = flash_attention(
        tokens, keys[0].transpose(0, 1), values[0].transpose(0, 1), bounds, ends, len(tokens), keys.shape[2]
    )
    return output.unflatten(0, (batch_size, n)).transpose(1, 2), lse.unflatten(1, (batch_size, n)).transpose(0, 1)


def _attend_named(query: Tensor, context: PackedContext, codec: KVCodec, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Attention of rows to the contexts that they name, where these lie; returned as by `_attend_shared`."""
    batch_size, _, n, _ = query.shape
    assert context.index is not None
    assert context.lengths is not None
    most_queries = context.index.most_rows * n
    bounds, named = context.index.bounds(n, query.device)
    lengths = context.lengths[named].to(torch.int32)
    if not isinstance(codec, ExactCodec):
        # Only what is read is decoded.
        context = context.of(named)
        named = torch.arange(len(named), dtype=torch.int32, device=query.device)
    keys, values = decode(codec, layer_idx, context, query.dtype)
    (all_keys, starts), (all_values, _) = as_one(keys, named), as_one(values, named)
    output, lse = flash_attention(
        query.transpose(1, 2).flatten(0, 1),
        all_keys,
        all_values,
        bounds,
        starts,
        most_queries,
        keys.shape[2],
        lengths,
    )
    return output.unflatten(0, (batch_size, n)).transpose(1, 2), lse.unflatten(1, (batch_size, n)).transpose(0, 1)


def as_one(x: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values of contexts, [C, H, L, D], as those of one sequence of which each context is a part; not copied.

    Between the parts are tokens that belong to none, if heads lie one after the other.

    Args:
        x: the keys or values.
        contexts: those that are read, int32 [n].

    Returns:
        [S, H, D], and where the tokens of each of these contexts begin, with one more entry, int32 [n + 1].
    """
    context_stride, head_stride, token_stride, _ = x.stride()
    if x.stride(3) != 1 or context_stride % token_stride:
        x = x.contiguous()
        context_stride, head_stride, token_stride, _ = x.stride()
    count, heads, columns, head_dim = x.shape
    step = context_stride // token_stride
    tokens = x.as_strided(((count - 1) * step + columns, heads, head_dim), (token_stride, head_stride, 1))
    return tokens, torch.nn.functional.pad(contexts * step, (0, 1))


def _attend_masked(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of every row to its context, or to a shared one, with hidden columns; returned as by `_attend_shared`.

    Memory-efficient attention (Rabe and Staats 2021) reads a shared context and masks without copying them.
    """
    batch_size, heads, n, _ = query.shape
    columns = keys.shape[2]
    padded = -(-columns // _ALIGNMENT) * _ALIGNMENT
    bias = query.new_zeros(len(visible), padded)
    bias[:, :columns].masked_fill_(~visible, torch.finfo(query.dtype).min)
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query,
        keys.expand(batch_size, -1, -1, -1),
        values.expand(batch_size, -1, -1, -1),
        bias[:, None, None, :columns].expand(batch_size, heads, n, -1),
        True,
        scale=1.0,
    )
    # A row that sees nothing must not count, however large the other rows' scores are.
    hidden = ~visible.any(dim=1)
    return output, lse[..., :n].masked_fill(hidden[:, None, None], float("-inf"))


@operator("attend_new")
def attend_new(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, past: Tensor, lse: Tensor) -> Tensor:
    """Adds the new tokens to attention to the past; one launch.

    Args:
        query: of the new tokens, after RoPE and scaling, [B, H, n, D].
        keys: of the new tokens, after RoPE, [B, H, n, D].
        values: of the new tokens, [B, H, n, D].
        mask: which new tokens are seen, bool [B, n]; None for all.
        past: attention to the past, [B, H, n, D].
        lse: log of its sum of exponentials, float32 [B, H, n], -inf for a past that is not seen.

    Returns:
        [B, H, n, D], in the query's dtype; zeros for a row that sees nothing.
    """
    from esm_turbo.ops.kernels import extension as kernels

    batch_size, heads, n, head_dim = query.shape
    output = empty_by_token(query)
    query, keys, values, past = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values, past))
    lse = lse if lse.stride(2) == 1 else lse.contiguous()
    shown = None if mask is None else mask.expand(batch_size, -1).contiguous().view(torch.uint8)
    launch(
        kernels.attend_new,
        (-(-n // _TILE), heads, batch_size),
        query.device,
        Options(num_warps=4),
        query_ptr=query,
        key_ptr=keys,
        value_ptr=values,
        mask_ptr=placeholder(torch.uint8, query.device) if shown is None else shown,
        past_ptr=past,
        lse_ptr=lse,
        output_ptr=output,
        **strides(q=query, k=keys, v=values, p=past),
        lse_stride_b=lse.stride(0),
        lse_stride_h=lse.stride(1),
        num_tokens=n,
        num_heads=heads,
        has_mask=int(shown is not None),
        HEAD_DIM=head_dim,
        SIZE=max(16, next_power_of_two(head_dim)),
        T=_TILE,
        PRECISION="tf32x3" if query.dtype == torch.float32 and not interpreted() else "ieee",
    )
    return output


def _attend_new_fake(query: Tensor, *_: object) -> Tensor:
    return empty_by_token(query)


torch.library.register_fake("esm_turbo::attend_new", _attend_new_fake)
