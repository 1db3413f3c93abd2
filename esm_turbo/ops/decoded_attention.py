"""Attention to contexts that are decoded first, on CUDA.

The kernels of packed contexts decode a tile for every 16 queries. Where many rows share a context it is cheaper to
decode it once, in the model's dtype, and to read a tile of it for 64 queries (`attend_shared`). A context at full
precision needs no decoding at all. In float32 PyTorch's attention reads the past, and a kernel adds the new tokens
(`attend_new`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs import ExactCodec, KVCodec, PackedContext
from esm_turbo.ops.triton_launch import Options, empty_by_token, interpreted, launch, operator, placeholder, strides
from esm_turbo.ops.triton_layout import next_power_of_two

__all__ = ["attend_new", "attend_shared", "decode", "extend_attention", "pays", "queries_per_tile"]

# Queries from which decoding pays, of all contexts together and for each, measured on an H200.
_MIN_QUERIES = 5000
_MIN_QUERIES_EACH = 2048
_HALF = (torch.float16, torch.bfloat16)
# Tokens per tile of `attend_new`.
_TILE = 32
# Queries of a tile of `attend_shared`, and tokens that it reads at a time: of small heads, and of large ones.
_QUERIES = 64
_TOKENS = 64, 32
# Its registers per thread and stages of loads, for both: so few that several programs fit a multiprocessor.
_LIMITS = (128, 2), (168, 3)
# Queries of whole rows fill a tile if they are at least this part of it.
_FULL = 0.75
_SMALL_HEAD = 64
# Alignment of a row of the bias, in elements.
_ALIGNMENT = 8


def pays(query: Tensor, context: PackedContext, codec: KVCodec) -> bool:
    """True if to decode the context: it is exact, or many queries share it and hide none of its columns."""
    if query.device.type != "cuda":
        return False
    contexts = 1 if context.index is None else len(context.index.groups)
    whole = _is_shared(context) if context.index is None else _reads_whole_contexts(query, context)
    if isinstance(codec, ExactCodec):
        return whole or context.index is None
    enough = query.shape[0] * query.shape[2] >= max(_MIN_QUERIES, _MIN_QUERIES_EACH * contexts)
    return whole and query.dtype in _HALF and enough


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
    index, n = context.index, query.shape[2]
    if index is not None and not isinstance(codec, ExactCodec):
        # Only what is read is decoded.
        index, read = index.of_read(query.device)
        context = context.of(read)
    past_keys, past_values = decode(codec, layer_idx, context, query.dtype)
    if query.dtype not in _HALF:
        past, lse = _attend_masked(query, past_keys, past_values, _visible_columns(context, past_keys.shape[2]))
        return attend_new(query, keys, values, mask, past, lse)
    lengths, visible = context.lengths, context.visible
    if lengths is None:
        contexts, _, columns, _ = past_keys.shape
        lengths = torch.full((contexts,), columns, dtype=torch.int64, device=query.device)
        visible = context.mask
    tiles = None if index is None else index.tiles(n, queries_per_tile(n), query.device)
    return attend_shared(query, keys, values, mask, past_keys, past_values, lengths, visible, tiles)


def _is_shared(context: PackedContext) -> bool:
    """True if there is one context, of which every row sees all tokens."""
    one = len(next(iter(context.packed.values()))) == 1
    return one and context.lengths is not None and context.visible is None


def _reads_whole_contexts(query: Tensor, context: PackedContext) -> bool:
    """True if `attend_shared` can read the contexts that rows name: in half precision, with nothing hidden."""
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


def _attend_masked(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of every row to its context, or to a shared one, with hidden columns.

    Memory-efficient attention (Rabe and Staats 2021) reads a shared context and masks without copying them.

    Returns:
        [B, H, n, D], and log-sum-exp, float32 [B, H, n].
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


def queries_per_tile(num_tokens: int) -> int:
    """Queries that a tile of `attend_shared` takes, for rows of `num_tokens`: of whole rows, if these fill it well.

    A tile reads the new tokens of all its rows, also of those that another tile shares.
    """
    whole = _QUERIES // num_tokens * num_tokens
    return whole if whole >= _FULL * _QUERIES else _QUERIES


@operator("attend_shared", lambda query, *_: empty_by_token(query))
def attend_shared(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    past_keys: Tensor,
    past_values: Tensor,
    lengths: Tensor,
    visible: Tensor | None,
    tiles: Tensor | None,
) -> Tensor:
    """Attention of new tokens to contexts, best shared by many rows, and to the new tokens of their row; one launch.

    Args:
        query: of the new tokens, after RoPE and scaling, [B, H, n, D], in half precision.
        keys: of the new tokens, after RoPE, [B, H, n, D].
        values: of the new tokens, [B, H, n, D].
        mask: which new tokens are seen, bool [B, n]; None for all.
        past_keys: of the contexts, in the query's dtype, [C, H, L, D].
        past_values: likewise.
        lengths: tokens of every context, integers [C].
        visible: which columns of its context a row sees, bool [B or 1, L]; None for all.
        tiles: where rows name their contexts, the `row_index.Tiles.table` of `queries_per_tile` queries, int32
            [tiles, 3]. None where each row has its own context, or all share the only one.

    Returns:
        [B, H, n, D], in the query's dtype; zeros for a row that sees nothing.

    Raises:
        ValueError: there are no tiles, and neither one context nor one for each row.
    """
    from esm_turbo.ops.kernels import shared as kernels

    batch_size, heads, n, head_dim = query.shape
    contexts = len(past_keys)
    if tiles is None and contexts not in (1, batch_size):
        raise ValueError(f"{batch_size} rows must name the contexts that they read, or share one; got {contexts}")
    output = empty_by_token(query)
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values))
    past_keys, past_values = (_in_whole_heads(x) for x in (past_keys, past_values))
    shown = None if mask is None else mask.expand(batch_size, -1).contiguous().view(torch.uint8)
    seen = None if visible is None else visible.contiguous().view(torch.uint8)
    no_bytes = placeholder(torch.uint8, query.device)
    queries, step = batch_size * n // (contexts if tiles is None else 1), queries_per_tile(n)
    num_tiles = contexts * -(-queries // step) if tiles is None else len(tiles)
    large = head_dim > _SMALL_HEAD
    registers, stages = _LIMITS[large]
    launch(
        kernels.attend_shared,
        (num_tiles * heads, 1, 1),
        query.device,
        Options(num_warps=4, num_stages=stages, maxnreg=registers),
        query_ptr=query,
        key_ptr=keys,
        value_ptr=values,
        mask_ptr=no_bytes if shown is None else shown,
        past_key_ptr=past_keys,
        past_value_ptr=past_values,
        length_ptr=lengths,
        visible_ptr=no_bytes if seen is None else seen,
        tile_ptr=placeholder(torch.int32, query.device) if tiles is None else tiles,
        output_ptr=output,
        **strides(q=query, k=keys, v=values),
        **_head_strides(past_key=past_keys, past_value=past_values),
        visible_row=0 if seen is None or len(seen) == 1 else seen.stride(0),
        num_tokens=n,
        num_heads=heads,
        queries_per_context=queries,
        queries_per_tile=step,
        has_mask=int(shown is not None),
        has_visible=int(seen is not None),
        has_tiles=int(tiles is not None),
        HEAD_DIM=head_dim,
        SIZE=max(16, next_power_of_two(head_dim)),
        BLOCK_M=_QUERIES,
        BLOCK_N=_TOKENS[large],
    )
    return output


def _in_whole_heads(x: Tensor) -> Tensor:
    """x [C, H, L, D] in memory where neighbours along every other dimension are a multiple of D numbers apart."""
    return x if x.stride(3) == 1 and not any(step % x.shape[3] for step in x.stride()[:3]) else x.contiguous()


def _head_strides(**tensors: Tensor) -> dict[str, int]:
    """Arguments of a kernel for tensors x [C, H, L, D]: `x_b`, `x_h` and `x_n`, in units of D.

    Other strides would be multiples of 16 or not with the length of a context, which would make more variants.
    """
    return {
        f"{name}_{axis}": x.stride(dim) // x.shape[3] for name, x in tensors.items() for dim, axis in enumerate("bhn")
    }


@operator("attend_new", lambda query, *_: empty_by_token(query))
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
        BLOCK_N=_TILE,
        PRECISION="tf32x3" if query.dtype == torch.float32 and not interpreted() else "ieee",
    )
    return output
