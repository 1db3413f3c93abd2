"""Triton kernels for RoPE and GELU of a layer with few new tokens: one launch each instead of PyTorch's 15 and 5.

They round wherever PyTorch's operations round, so that an extension computes the same as a prefill.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 1 / sqrt(2): PyTorch multiplies by it on CUDA where the model divides by sqrt(2).
_INVERSE_SQRT2: tl.constexpr = tl.constexpr(0.7071067811865475)


@triton.jit
def _rotate_heads(x_ptr, out_ptr, cos, sin, scale, stride_h, head, d, inside, HEAD_DIM: tl.constexpr):
    """Scales and rotates the heads of one token, [HEADS, HALF] for each half."""
    x_ptrs = x_ptr + head[:, None] * stride_h + d[None, :]
    low = tl.load(x_ptrs, mask=inside, other=0.0)
    high = tl.load(x_ptrs + HEAD_DIM // 2, mask=inside, other=0.0)
    dtype: tl.constexpr = low.dtype
    low = (low.to(tl.float32) * scale).to(dtype).to(tl.float32)
    high = (high.to(tl.float32) * scale).to(dtype).to(tl.float32)
    out_ptrs = out_ptr + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptrs, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(out_ptrs + HEAD_DIM // 2, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit
def rotate(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    new_query_ptr,
    new_key_ptr,
    scale: tl.float32,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    cos_stride_b,
    cos_stride_n,
    num_heads,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """RoPE of queries, which are scaled first, and of keys: [x_low cos - x_high sin, x_high cos + x_low sin].

    Grid: (tokens, head tiles, batch). With OVERLAP, the next kernel may begin with what does not depend on this one.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    batch = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, HALF)
    in_half = d < HEAD_DIM // 2
    inside = (head < num_heads)[:, None] & in_half[None, :]
    # Both halves of a head have the same angles.
    angle = batch * cos_stride_b + token * cos_stride_n + d
    cos = tl.load(cos_ptr + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]  # [1, HALF]
    sin = tl.load(sin_ptr + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    query_ptr += batch * stride_qb + token * stride_qn
    key_ptr += batch * stride_kb + token * stride_kn
    out = (batch * num_tokens + token) * num_heads * HEAD_DIM
    _rotate_heads(query_ptr, new_query_ptr + out, cos, sin, scale, stride_qh, head, d, inside, HEAD_DIM)
    _rotate_heads(key_ptr, new_key_ptr + out, cos, sin, 1.0, stride_kh, head, d, inside, HEAD_DIM)


@triton.jit
def gelu(x_ptr, out_ptr, numel: tl.int64, BLOCK: tl.constexpr):
    """GELU, x / 2 (1 + erf(x / sqrt(2))), rounded after every step. Grid: (blocks,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    x = tl.load(x_ptr + i, mask=inside, other=0.0)  # [BLOCK]
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    error = (x * _INVERSE_SQRT2).to(dtype).to(tl.float32)
    error = tl.erf(error).to(dtype).to(tl.float32)
    factor = (1.0 + error).to(dtype).to(tl.float32)
    half = (x * 0.5).to(dtype).to(tl.float32)
    tl.store(out_ptr + i, (half * factor).to(dtype), mask=inside)
