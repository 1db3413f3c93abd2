"""Triton kernel of extensions whose past was attended to elsewhere: it adds the new tokens."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit(do_not_specialize_on_alignment=["mask_ptr", "lse_ptr"])
def attend_new(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    past_ptr,
    lse_ptr,
    output_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_pb,
    stride_ph,
    stride_pn,
    lse_stride_b,
    lse_stride_h,
    num_tokens,
    num_heads,
    has_mask,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Continues an online softmax (Milakov and Gimelshein 2018) over the past with the new tokens of a row.

    With o_p and lse_p of the past, o = (exp(lse_p) o_p + sum_j exp(q k_j) v_j) / (exp(lse_p) + sum_j exp(q k_j)).
    Tensors are [B, H, n, D], the mask uint8 [B, n], read if `has_mask`, lse float32 [B, H, n].
    Grid: (n / BLOCK_N, H, B).
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, SIZE)
    in_head = d < HEAD_DIM
    in_rows = i < num_tokens
    block = in_rows[:, None] & in_head[None, :]
    query = tl.load(
        query_ptr + row * stride_qb + head * stride_qh + i[:, None] * stride_qn + d[None, :], mask=block, other=0.0
    )  # [BLOCK_N, SIZE]
    past = tl.load(
        past_ptr + row * stride_pb + head * stride_ph + i[:, None] * stride_pn + d[None, :], mask=block, other=0.0
    )
    lse = tl.load(lse_ptr + row * lse_stride_b + head * lse_stride_h + i, mask=in_rows, other=0.0)
    # NaN is not an empty past.
    seen = (lse > _LOWEST) | (lse != lse)
    m_i = tl.where(seen, lse * _LOG2_E, _LOWEST)  # [BLOCK_N], in units of log 2
    l_i = tl.where(seen, 1.0, 0.0)
    acc = tl.where(seen[:, None], past.to(tl.float32), 0.0)  # [BLOCK_N, SIZE]
    for start in range(0, num_tokens, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        shown = j < num_tokens
        tile = shown[:, None] & in_head[None, :]
        key = tl.load(
            key_ptr + row * stride_kb + head * stride_kh + j[:, None] * stride_kn + d[None, :], mask=tile, other=0.0
        )
        value = tl.load(
            value_ptr + row * stride_vb + head * stride_vh + j[:, None] * stride_vn + d[None, :], mask=tile, other=0.0
        )
        mask = tl.load(mask_ptr + row * num_tokens + j, mask=shown & (has_mask != 0), other=1)
        shown = shown & (mask != 0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * _LOG2_E  # [BLOCK_N, BLOCK_N]
        scores = tl.where(shown[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        weights = tl.exp2(scores - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = l_i * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        m_i = m_new
    output = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    # The output is [B, n, H, D] in memory.
    out_ptr = output_ptr + ((row * num_tokens + i[:, None]) * num_heads + head) * HEAD_DIM + d[None, :]
    tl.store(out_ptr, output.to(output_ptr.dtype.element_ty), mask=block)
