"""Queries in the space of the stored keys. Imported only where kernels run; docs/notes/kernels.md gives the reasons.

A query is scaled by a power of two, rotated back by the first column of a block, and mapped. These steps are matrix
products, and so is the bias of its scores: the keys' mean and the bias of their fields are columns of an operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.operands import slab_of
from esm_turbo.ops.kernels.products import as_lhs, dot, pairs_to_quads, slab_zeros


@triton.jit
def read_tile(tile_ptr, row_tile, context, num_rows, has_tiles, BLOCK_M: tl.constexpr):
    """The context that a tile of queries reads, its first query, and the query after its last one.

    Without a table nothing is loaded, and nothing waited for.
    """
    tile_ptr += row_tile * 3
    read = tl.load(tile_ptr, mask=has_tiles != 0, other=context)
    first = tl.load(tile_ptr + 1, mask=has_tiles != 0, other=row_tile * BLOCK_M)
    end = tl.load(tile_ptr + 2, mask=has_tiles != 0, other=num_rows)
    return read, first, end


@triton.jit
def row_and_token(query, num_tokens, BLOCK_M: tl.constexpr):
    """The row of the extension that a query belongs to, and its number there; a single query is its row's only one."""
    if BLOCK_M == 1:
        return query, query * 0
    else:
        return query // num_tokens, query % num_tokens


@triton.jit
def floor_power_of_two(x):
    """The largest power of two that is at most x: x with its mantissa cleared. 0 for subnormal x."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def load_scaled_queries(query_ptrs, in_rows, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Both halves of queries divided by a power of two, [ROWS, HALF] each, and these powers, [ROWS].

    Divided by a power of two near their largest component, queries of any magnitude fit half precision, and the
    division rounds none of them.

    Args:
        query_ptrs: pointers to the queries' first components, [ROWS].
        in_rows: which rows hold a query, [ROWS].
    """
    d = tl.arange(0, HALF)
    inside = in_rows[:, None] & (d < HEAD_DIM // 2)[None, :]
    low = tl.load(query_ptrs[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)  # [ROWS, HALF]
    high = tl.load(query_ptrs[:, None] + HEAD_DIM // 2 + d[None, :], mask=inside, other=0.0).to(tl.float32)
    size = floor_power_of_two(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1))
    size = tl.where(size > 0, size, 1.0)
    inverse = (1.0 / size)[:, None]
    return (low * inverse).to(DTYPE), (high * inverse).to(DTYPE), size


@triton.jit
def load_mean(mean_ptr, residual_ptr, d, inside):
    """The keys' mean at components d, plus the context's mean residual where there is one."""
    mean = tl.load(mean_ptr + d, mask=inside, other=0.0)
    if residual_ptr is not None:
        mean += tl.load(residual_ptr + d, mask=inside, other=0.0).to(tl.float32)
    return mean


@triton.jit
def split_in_two(x, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """x [n] as the sum of two numbers of DTYPE, in the first two of PARTS columns, [n, PARTS]."""
    part = tl.arange(0, PARTS)[None, :]
    first = x.to(DTYPE)
    rest = (x - first.to(tl.float32)).to(DTYPE)
    return tl.where(part == 0, first[:, None], tl.where(part == 1, rest[:, None], 0.0))


@triton.jit
def load_query_maps(map_ptr, HALF: tl.constexpr, KEYS: tl.constexpr, KEY_SIZE: tl.constexpr):
    """The maps of both halves of a query to every key slab, [size, HALF] each."""
    d = tl.arange(0, HALF)[None, :]
    maps = ()
    start = 0
    for i in tl.static_range(len(KEYS)):
        slab_ptr = map_ptr + (start + tl.arange(0, slab_of(KEYS, i).size))[:, None] * HALF + d
        maps = maps + (tl.load(slab_ptr), tl.load(slab_ptr + KEY_SIZE * HALF))
        start += slab_of(KEYS, i).size
    return maps


@triton.jit
def load_field_biases(
    bias_ptr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The biases of the fields of every key slab, in the first of PARTS rows, [PARTS, size] each."""
    part = tl.arange(0, PARTS)[:, None]
    biases = ()
    start = 0
    for i in tl.static_range(len(KEYS)):
        column = start + tl.arange(0, slab_of(KEYS, i).size)
        bias = tl.load(bias_ptr + (part * 0 + column[None, :]), mask=part == 0, other=0.0)
        biases = biases + (bias.to(DTYPE),)
        start += slab_of(KEYS, i).size
    return biases


@triton.jit
def _rotate_back(low, high, cos, sin, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Both halves of queries [ROWS, HALF] rotated by minus the angles [ROWS or 1, HALF], in DTYPE.

    In half precision one instruction works on two numbers, and products are rounded as well as sums.
    """
    if ASM and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; mul.rn.f16x2 t, $3, $5; fma.rn.f16x2 $0, $2, $4, t; mul.rn.f16x2 u, $2, $5;"
            " neg.f16x2 u, u; fma.rn.f16x2 $1, $3, $4, u; }",
            "=r,=r,r,r,r,r",
            [low, high, cos.to(tl.float16), sin.to(tl.float16)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        return (low * cos + high * sin).to(DTYPE), (high * cos - low * sin).to(DTYPE)


@triton.jit
def map_queries(
    low,
    high,
    block,
    maps,
    mean_low,
    mean_high,
    mean_scale,
    field_biases,
    angle_ptr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    ROTATED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scaled queries in the space of the stored keys: T^-T R(-b) q, with the first column b of each query's block.

    Args:
        low: lower half of the scaled queries, [ROWS, HALF].
        high: upper half.
        block: one block for all rows, or [ROWS, 1].
        maps: see `load_query_maps`.
        mean_low: lower half of the keys' mean, see `split_in_two`.
        mean_high: upper half.
        mean_scale: by which the means were divided.
        field_biases: see `load_field_biases`.
        angle_ptr: cosines and sines of the blocks' first columns.

    Returns:
        The bias of each row's scores, [ROWS]: the product with the keys' mean plus that with the fields' biases. Then
        the mapped queries of every key slab, [ROWS, size] each, as left operands of `dot_fields`.
    """
    rows: tl.constexpr = low.shape[0]
    if ROTATED:
        d = tl.arange(0, HALF)[None, :]
        in_half = d < HEAD_DIM // 2
        angle_ptrs = angle_ptr + block * HEAD_DIM + d
        cos = tl.load(angle_ptrs, mask=in_half, other=0.0)  # [ROWS or 1, HALF]
        sin = tl.load(angle_ptrs + HEAD_DIM // 2, mask=in_half, other=0.0)
        low, high = _rotate_back(low, high, cos, sin, DTYPE, ASM)
    bias = tl.zeros((rows, mean_low.shape[1]), tl.float32)
    bias = dot(low, mean_low, bias, PRECISION)
    bias = dot(high, mean_high, bias, PRECISION) * mean_scale
    low = low.to(maps[0].dtype)
    high = high.to(maps[0].dtype)
    queries = ()
    for i in tl.static_range(len(KEYS)):
        mapped = dot(low, tl.trans(maps[2 * i]), slab_zeros(slab_of(KEYS, i), rows), PRECISION)  # [ROWS, size]
        mapped = dot(high, tl.trans(maps[2 * i + 1]), mapped, PRECISION).to(DTYPE)
        # With the rounded queries, so that the fields' biases cancel exactly.
        bias = dot(mapped, tl.trans(field_biases[i]), bias, PRECISION)
        queries = queries + (as_lhs(pairs_to_quads(mapped)),)
    return (tl.sum(bias, 1),) + queries
