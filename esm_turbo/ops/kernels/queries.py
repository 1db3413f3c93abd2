"""Queries in the space of the stored keys. Imported only where kernels run; docs/kernels.md says why so.

A query is scaled by a power of two, turned back by the first column of a block, and mapped. All of that is products:
the keys' mean and what fields count too much are columns of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.operands import places_of
from esm_turbo.ops.kernels.products import dot, in_fours, oriented, zeros_of


@triton.jit
def power_below(x):
    """The largest that is not larger than x, 0 for x below the normal numbers: its exponent alone."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scaled_queries(at, known, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Either half of queries at `at` [rows], divided by a power of two, [rows, HALF], and the powers.

    Queries of any size fit half precision once divided by their largest component, and by a power of two none of them
    is rounded.
    """
    d = tl.arange(0, HALF)
    inside = known[:, None] & (d < HEAD_DIM // 2)[None, :]
    low = tl.load(at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at[:, None] + HEAD_DIM // 2 + d[None, :], mask=inside, other=0.0).to(tl.float32)
    size = power_below(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1))
    size = tl.where(size > 0, size, 1.0)
    inverse = (1.0 / size)[:, None]
    return (low * inverse).to(DTYPE), (high * inverse).to(DTYPE), size


@triton.jit
def mean_of(mean_ptr, residual_ptr, d, inside):
    mean = tl.load(mean_ptr + d, mask=inside, other=0.0)
    if residual_ptr is not None:
        mean += tl.load(residual_ptr + d, mask=inside, other=0.0).to(tl.float32)
    return mean


@triton.jit
def in_two(x, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """x [n] as the sum of two numbers of DTYPE, in the first two of PARTS columns, [n, PARTS]."""
    part = tl.arange(0, PARTS)[None, :]
    first = x.to(DTYPE)
    rest = (x - first.to(tl.float32)).to(DTYPE)
    return tl.where(part == 0, first[:, None], tl.where(part == 1, rest[:, None], 0.0))


@triton.jit
def maps_of(map_ptr, HALF: tl.constexpr, KEYS: tl.constexpr, KEY_SIZE: tl.constexpr):
    """Of every key slab, the map of either half of a query, [size, HALF] each."""
    d = tl.arange(0, HALF)[None, :]
    maps = ()
    start = 0
    for i in tl.static_range(len(KEYS)):
        here = map_ptr + (start + places_of(KEYS, i))[:, None] * HALF + d
        maps = maps + (tl.load(here), tl.load(here + KEY_SIZE * HALF))
        start += KEYS[i][4]
    return maps


@triton.jit
def corrections_of(
    correction_ptr,
    KEYS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Of every key slab, what its fields count too much, in the first two of PARTS rows, [PARTS, size]."""
    part = tl.arange(0, PARTS)[:, None]
    corrections = ()
    start = 0
    for i in tl.static_range(len(KEYS)):
        correction = tl.load(correction_ptr + part * KEY_SIZE + (start + places_of(KEYS, i))[None, :]).to(DTYPE)
        if not ASM or tl.float16 != DTYPE:
            # The first part is of fields that are masked into half precision.
            correction = tl.where(part > 0, correction, 0.0)
        if tl.float32 == DTYPE:
            # Centred by a whole number they lack half of what a field counts by, not the middle of all.
            correction /= 1 - 2 ** KEYS[i][0]
        corrections = corrections + (correction,)
        start += KEYS[i][4]
    return corrections


@triton.jit
def _turned(low, high, cos, sin, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Either half of queries [rows, HALF], turned back by angles [rows or 1, HALF], in DTYPE.

    In half precision two numbers are turned at once, which rounds products as well as sums.
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
def mapped_queries(
    low,
    high,
    block,
    maps,
    mean_low,
    mean_high,
    mean_scale,
    corrections,
    angle_ptr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    ROTATED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scaled queries in the space of the stored keys, each turned back by the first column of its block.

    `block` is one for all, or [rows, 1]. Returns what all scores of a row lack, [rows]: the product with the keys'
    mean, less what fields count too much; and for every key slab the mapped queries, [rows, size].
    """
    rows: tl.constexpr = low.shape[0]
    if ROTATED:
        d = tl.arange(0, HALF)[None, :]
        in_head = d < HEAD_DIM // 2
        angles = angle_ptr + block * HEAD_DIM + d
        cos = tl.load(angles, mask=in_head, other=0.0)
        sin = tl.load(angles + HEAD_DIM // 2, mask=in_head, other=0.0)
        low, high = _turned(low, high, cos, sin, DTYPE, ASM)
    lacking = tl.zeros((rows, mean_low.shape[1]), tl.float32)
    lacking = dot(low, mean_low, lacking, PRECISION)
    lacking = dot(high, mean_high, lacking, PRECISION) * mean_scale
    low = low.to(maps[0].dtype)
    high = high.to(maps[0].dtype)
    queries = ()
    for i in tl.static_range(len(KEYS)):
        mapped = dot(low, tl.trans(maps[2 * i]), zeros_of(KEYS, i, rows), PRECISION)
        mapped = dot(high, tl.trans(maps[2 * i + 1]), mapped, PRECISION).to(DTYPE)
        # Of the rounded queries, so that it cancels.
        lacking = dot(mapped, tl.trans(corrections[i]), lacking, PRECISION)
        queries = queries + (oriented(in_fours(mapped)),)
    return (tl.sum(lacking, 1),) + queries
