"""Triton kernels of the packed encoder: residual sums with layer norm, rotation in place, and the activation.

Arithmetic is float32; each result is rounded to the model's dtype once, when it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INVERSE_SQRT2: tl.constexpr = tl.constexpr(0.7071067811865475)


@triton.jit
def add_layer_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    normed_ptr,
    eps: tl.float32,
    adds,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sum = x + delta; normed = (sum - mean) / sqrt(var + eps) * weight + bias. Grid: (tokens,).

    The statistics are those of the sum as it is stored. Unless it `adds`, x itself is normalised.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)  # [BLOCK]
    dtype: tl.constexpr = x.dtype
    if adds != 0:
        delta = tl.load(delta_ptr + row + column, mask=inside, other=0.0)  # [BLOCK]
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row + column, x, mask=inside)
    x = x.to(tl.float32)
    mean = tl.sum(x, axis=0) / SIZE
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = centred * scale * weight + bias
    tl.store(normed_ptr + row + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    scale: tl.float32,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """RoPE of a token's queries and keys, in place: (a, b) -> (a cos - b sin, b cos + a sin). Grid: (tokens,).

    Queries are also multiplied by `scale`.

    qkv is [tokens, 3, HEADS, HEAD_DIM]; its first 2 HEADS rows of a token are queries and keys.
    """
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_BLOCK)
    in_half = d < half
    cos = tl.load(cos_ptr + token * half + d, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * half + d, mask=in_half, other=0.0)[None, :]
    head = tl.arange(0, HEADS_BLOCK)
    inside = (head < 2 * HEADS)[:, None] & in_half[None, :]
    factor = tl.where(head < HEADS, scale, 1.0)[:, None]
    cos, sin = cos * factor, sin * factor  # [HEADS_BLOCK, HALF_BLOCK]
    low_ptr = qkv_ptr + token * (3 * HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    low = tl.load(low_ptr, mask=inside, other=0.0).to(tl.float32)  # [HEADS_BLOCK, HALF_BLOCK]
    high = tl.load(low_ptr + half, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    tl.store(low_ptr, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(low_ptr + half, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit
def gelu_(x_ptr, count: tl.int64, BLOCK: tl.constexpr):
    """x / 2 (1 + erf(x / sqrt(2))), in place. Grid: (blocks,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    activated = x * 0.5 * (1.0 + tl.erf(x * _INVERSE_SQRT2))
    tl.store(x_ptr + i, activated.to(x_ptr.dtype.element_ty), mask=inside)
