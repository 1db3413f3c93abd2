"""Triton kernels of the packed encoders: residual sums with layer norm, rotation in place, and the activations.

Arithmetic is float32; each result is rounded to the model's dtype once, when it is stored. What eight-bit products take
is rounded to that dtype first, and then to e4m3 with a scale for each token, see `float8.quantize`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INVERSE_SQRT2: tl.constexpr = tl.constexpr(0.7071067811865475)
# As in `float8`.
_LARGEST_CODE: tl.constexpr = tl.constexpr(448.0)
_SMALLEST_MAXIMUM: tl.constexpr = tl.constexpr(2.0**-60)


@triton.jit
def _gelu(x):
    """x / 2 (1 + erf(x / sqrt(2))), by erf's approximation 7.1.26 of Abramowitz and Stegun (1964), to 1e-6.

    Of long rows, `tl.erf` takes longer than their memory traffic.
    """
    z = tl.abs(x) * _INVERSE_SQRT2
    t = 1.0 / (1.0 + 0.3275911 * z)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.maximum(x, 0.0) - 0.5 * tl.abs(x) * polynomial * tl.exp(-z * z)


@triton.jit
def _gated(gate, up):
    """silu(gate) up."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _scale_of(largest, scale_ptr):
    """The factor to e4m3 of a token whose largest magnitude is this; its inverse is stored."""
    largest = tl.maximum(largest, _SMALLEST_MAXIMUM)
    tl.store(scale_ptr, tl.div_rn(largest, _LARGEST_CODE))
    return tl.div_rn(_LARGEST_CODE, largest)


@triton.jit
def add_layer_norm(
    x_ptr,
    delta_ptr,
    parts_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    normed_ptr,
    scales_ptr,
    eps: tl.float32,
    factor: tl.float32,
    adds,
    num_parts,
    centres,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """sum = x + factor * delta; normed = (sum - mean) / sqrt(var + eps) * weight + bias. Grid: (tokens,).

    The statistics are those of the sum as it is stored. If there are parts, [num_parts, tokens, SIZE], up to
    MOST_PARTS, their sum is the delta. Unless it `adds`, x itself is normalised. Unless it `centres`, mean and bias are
    zero. If there are scales, [tokens], normed is in e4m3. With OVERLAP, the next kernel may begin with what does not
    depend on this one.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside & (centres != 0), other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)  # [BLOCK]
    dtype: tl.constexpr = x.dtype
    # Zeros of what is not there, so that all loads are on their way at once.
    delta = tl.load(delta_ptr + row + column, mask=inside & (adds != 0) & (num_parts == 0), other=0.0).to(tl.float32)
    parts_ptrs = parts_ptr + row + column
    parts = ()
    for part in tl.static_range(MOST_PARTS):
        parts = parts + (tl.load(parts_ptrs, mask=inside & (part < num_parts), other=0.0),)
        parts_ptrs += tl.num_programs(0) * SIZE
    for part in tl.static_range(MOST_PARTS):
        delta += parts[part]
    x = (x.to(tl.float32) + factor * delta).to(dtype)
    if adds != 0:
        tl.store(sum_ptr + row + column, x, mask=inside)
    x = x.to(tl.float32)
    mean = tl.where(centres != 0, tl.sum(x, axis=0) / SIZE, 0.0)
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / SIZE + eps)
    normed = centred * scale * weight + bias
    if scales_ptr is not None:
        normed = normed.to(dtype).to(tl.float32)
        normed *= _scale_of(tl.max(tl.abs(normed), axis=0), scales_ptr + tl.program_id(0))
    tl.store(normed_ptr + row + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def clipped(x, clip):
    """Numbers within -clip and clip; NaN stays, as in `torch.clamp`."""
    x = tl.maximum(x, -clip, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, clip, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rotate_(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    scale: tl.float32,
    clip: tl.float32,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    CLIPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """RoPE of a token's queries and keys, in place: (a, b) -> (a cos - b sin, b cos + a sin). Grid: (tokens,).

    Queries are also multiplied by `scale`. If it CLIPS, queries, keys and values are clamped to -clip to clip before.
    With OVERLAP, the next kernel may begin with what does not depend on this one.

    qkv is [tokens, 3, HEADS, HEAD_DIM]; its first 2 HEADS rows of a token are queries and keys, then values follow.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_BLOCK)
    in_half = d < half
    cos = tl.load(cos_ptr + token * half + d, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * half + d, mask=in_half, other=0.0)[None, :]
    head = tl.arange(0, HEADS_BLOCK)
    inside = (head < (3 if CLIPS else 2) * HEADS)[:, None] & in_half[None, :]
    factor = tl.where(head < HEADS, scale, 1.0)[:, None]
    cos, sin = cos * factor, sin * factor  # [HEADS_BLOCK, HALF_BLOCK]
    if CLIPS:
        is_value = (head >= 2 * HEADS)[:, None]
        cos, sin = tl.where(is_value, 1.0, cos), tl.where(is_value, 0.0, sin)
    low_ptr = qkv_ptr + token * (3 * HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    low = tl.load(low_ptr, mask=inside, other=0.0).to(tl.float32)  # [HEADS_BLOCK, HALF_BLOCK]
    high = tl.load(low_ptr + half, mask=inside, other=0.0).to(tl.float32)
    if CLIPS:
        low, high = clipped(low, clip), clipped(high, clip)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    tl.store(low_ptr, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(low_ptr + half, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit
def gelu_(x_ptr, count: tl.int64, BLOCK: tl.constexpr):
    """x / 2 (1 + erf(x / sqrt(2))), in place. Grid: (blocks,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + i, _gelu(x).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_rotate_(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    eps: tl.float32,
    scale: tl.float32,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Layer norm over all heads, then RoPE, of a token's queries or keys, in place. Grid: (tokens, 2).

    x = (x - mean) / sqrt(var + eps) * weight, then (a, b) -> (a cos - b sin, b cos + a sin). Queries are also
    multiplied by `scale`.

    qkv is [tokens, 3, HEADS, HEAD_DIM].
    """
    half: tl.constexpr = HEAD_DIM // 2
    size: tl.constexpr = HEADS * HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    of_keys = tl.program_id(1)
    d = tl.arange(0, HALF_BLOCK)
    head = tl.arange(0, HEADS_BLOCK)
    in_half = d < half
    inside = (head < HEADS)[:, None] & in_half[None, :]
    channel = head[:, None] * HEAD_DIM + d[None, :]  # [HEADS_BLOCK, HALF_BLOCK]
    low_ptr = qkv_ptr + token * (3 * size) + of_keys * size + channel
    low = tl.load(low_ptr, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + half, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(low + high, axis=1), axis=0) / size
    low = tl.where(inside, low - mean, 0.0)
    high = tl.where(inside, high - mean, 0.0)
    variance = tl.sum(tl.sum(low * low + high * high, axis=1), axis=0) / size
    factor = tl.rsqrt(variance + eps)
    if of_keys == 0:
        factor = factor * scale
        weight_low = tl.load(query_weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        weight_high = tl.load(query_weight_ptr + half + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        weight_low = tl.load(key_weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        weight_high = tl.load(key_weight_ptr + half + channel, mask=inside, other=0.0).to(tl.float32)
    low = low * factor * weight_low
    high = high * factor * weight_high
    cos = tl.load(cos_ptr + token * half + d, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * half + d, mask=in_half, other=0.0)[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    tl.store(low_ptr, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(low_ptr + half, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit
def swiglu(gate_up_ptr, out_ptr, count: tl.int64, size: tl.int64, BLOCK: tl.constexpr):
    """silu(gate) up, with gate_up [tokens, 2, size] and out [tokens, size] of `count` elements. Grid: (blocks,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    gate_ptr = gate_up_ptr + i // size * (2 * size) + i % size
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, _gated(gate, up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantize(
    x_ptr,
    codes_ptr,
    scales_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """x, or its activation, in e4m3 with a scale for each token. Grid: (tokens,).

    x is [tokens, SIZE], or gate and up, [tokens, 2, SIZE], for the ACTIVATION `swiglu`; codes are [tokens, SIZE],
    scales [tokens]. A token lies in BLOCKS of BLOCK in registers. With OVERLAP, the next kernel may begin with what
    does not depend on this one.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_ptr = x_ptr + token * ((2 if ACTIVATION == "swiglu" else 1) * SIZE)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    blocks = ()
    for block in tl.static_range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < SIZE
        x = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == "swiglu":
            x = _gated(x, tl.load(row_ptr + SIZE + column, mask=inside, other=0.0).to(tl.float32))
        if ACTIVATION == "gelu":
            x = _gelu(x)
        x = x.to(dtype).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        blocks = blocks + (x,)
    factor = _scale_of(tl.max(largest, axis=0), scales_ptr + token)
    for block in tl.static_range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        codes = (blocks[block] * factor).to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + token * SIZE + column, codes, mask=column < SIZE)
