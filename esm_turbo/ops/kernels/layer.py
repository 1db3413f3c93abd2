"""Triton kernels of what else a layer does with few tokens: a launch each, where PyTorch has fifteen and five.

They round where PyTorch's operations round, so that an extension computes what a prefill computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 1 / sqrt(2), by which PyTorch multiplies on CUDA where the model divides by sqrt(2).
_INVERSE_SQRT2: tl.constexpr = tl.constexpr(0.7071067811865475)


@triton.jit
def _rotated(x_ptr, out_ptr, cos, sin, scale, stride_head, head, d, inside, HEAD_DIM: tl.constexpr):
    at = x_ptr + head[:, None] * stride_head + d[None, :]
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0)
    dtype: tl.constexpr = low.dtype
    low = (low.to(tl.float32) * scale).to(dtype).to(tl.float32)
    high = (high.to(tl.float32) * scale).to(dtype).to(tl.float32)
    at = out_ptr + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(at + HEAD_DIM // 2, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit
def rotate(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    new_query_ptr,
    new_key_ptr,
    scale,
    stride_query_row,
    stride_query_head,
    stride_query_token,
    stride_key_row,
    stride_key_head,
    stride_key_token,
    stride_angle_row,
    stride_angle_token,
    num_heads,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """RoPE of queries, which are scaled first, and of keys. Grid: (tokens, head tiles, batch).

    With OVERLAP, the kernel that follows may begin with what does not depend on this one.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    batch = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, HALF)
    in_head = d < HEAD_DIM // 2
    inside = (head < num_heads)[:, None] & in_head[None, :]
    # Both halves of a head have the same angles.
    angle = batch * stride_angle_row + token * stride_angle_token + d
    cos = tl.load(cos_ptr + angle, mask=in_head, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=in_head, other=0.0).to(tl.float32)[None, :]
    query_ptr += batch * stride_query_row + token * stride_query_token
    key_ptr += batch * stride_key_row + token * stride_key_token
    out = (batch * num_tokens + token) * num_heads * HEAD_DIM
    _rotated(query_ptr, new_query_ptr + out, cos, sin, scale, stride_query_head, head, d, inside, HEAD_DIM)
    _rotated(key_ptr, new_key_ptr + out, cos, sin, 1.0, stride_key_head, head, d, inside, HEAD_DIM)


@triton.jit
def gelu(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """x / 2 (1 + erf(x / sqrt(2))), rounded after every step. Grid: (blocks,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    error = (x * _INVERSE_SQRT2).to(dtype).to(tl.float32)
    error = tl.erf(error).to(dtype).to(tl.float32)
    factor = (1.0 + error).to(dtype).to(tl.float32)
    half = (x * 0.5).to(dtype).to(tl.float32)
    tl.store(out_ptr + i, (half * factor).to(dtype), mask=inside)
