"""Triton kernel of extensions whose contexts are decoded, made for rows that share one. Imported only where it runs."""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.attention import LOG2E, LOWEST


@triton.jit
def _attend(query, keys, values, visible, m_i, l_i, acc):
    """One step of an online softmax (Milakov and Gimelshein 2018) over tokens, of which a query sees the visible ones.

    Args:
        query: [BLOCK_M, SIZE].
        keys: [BLOCK_N, SIZE].
        values: [BLOCK_N, SIZE].
        visible: [BLOCK_M, BLOCK_N]; None for all.
        highest: the largest score so far, to base 2, [BLOCK_M].
        total: sum of exponentials, [BLOCK_M].
        acc: sum of weighted values, [BLOCK_M, SIZE].

    Returns:
        The last three with these tokens.
    """
    scores = tl.dot(query, tl.trans(keys))  # [BLOCK_M, BLOCK_N]
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1) * LOG2E)
    weights = tl.exp2(scores * LOG2E - m_new[:, None])
    rescale = tl.exp2(m_i - m_new)
    l_i = l_i * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None])
    return m_new, l_i, acc


@triton.jit(do_not_specialize_on_alignment=["mask_ptr", "length_ptr", "visible_ptr", "tile_ptr"])
def attend_shared(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    past_key_ptr,
    past_value_ptr,
    length_ptr,
    visible_ptr,
    tile_ptr,
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
    past_key_b,
    past_key_h,
    past_key_n,
    past_value_b,
    past_value_h,
    past_value_n,
    visible_row,
    num_tokens,
    num_heads,
    queries_per_context,
    queries_per_tile,
    has_mask,
    has_visible,
    has_tiles,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of rows to contexts, and of each row to its own new tokens.

    Queries, new keys and new values are [B, H, n, D], the mask uint8 [B, n], read if `has_mask`. The contexts' keys and
    values are [C, H, L, D], with strides in units of D. Which of their columns a row sees is uint8, `visible_row`
    apart, read if `has_visible`.

    The queries of all rows are numbered in order. A tile of up to `queries_per_tile` of them reads one context: each
    context has as many queries, or, if it `has_tiles`, a table [tiles, 3] names a tile's context, its first query, and
    the query after its last. Grid: (tiles x H,), heads first.
    """
    head = tl.program_id(0) % num_heads
    tile = tl.program_id(0) // num_heads
    tiles_per_context = tl.cdiv(queries_per_context, queries_per_tile)
    own = tile // tiles_per_context
    first = own * queries_per_context + tile % tiles_per_context * queries_per_tile
    end = tl.minimum(first + queries_per_tile, (own + 1) * queries_per_context)
    context = tl.load(tile_ptr + tile * 3, mask=has_tiles != 0, other=own).to(tl.int64)
    first = tl.load(tile_ptr + tile * 3 + 1, mask=has_tiles != 0, other=first)
    end = tl.load(tile_ptr + tile * 3 + 2, mask=has_tiles != 0, other=end)
    if first >= end:
        return
    length = tl.load(length_ptr + context).to(tl.int32)
    d = tl.arange(0, SIZE)
    in_head = (d < HEAD_DIM)[None, :]
    i = first + tl.arange(0, BLOCK_M)
    in_tile = i < end
    row = i // num_tokens
    query = tl.load(
        query_ptr
        + head * stride_qh
        + (row.to(tl.int64) * stride_qb + i % num_tokens * stride_qn)[:, None]
        + d[None, :],
        mask=in_tile[:, None] & in_head,
        other=0.0,
    )  # [BLOCK_M, SIZE]
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, SIZE), tl.float32)

    # Whole tiles of which nothing is hidden need no mask.
    t = tl.arange(0, BLOCK_N)
    past_key_ptr += (context * past_key_b + head * past_key_h) * HEAD_DIM
    past_value_ptr += (context * past_value_b + head * past_value_h) * HEAD_DIM
    key_ptrs = past_key_ptr + (t * past_key_n * HEAD_DIM)[:, None] + d[None, :]
    value_ptrs = past_value_ptr + (t * past_value_n * HEAD_DIM)[:, None] + d[None, :]
    end_whole = tl.where(has_visible != 0, 0, length // BLOCK_N * BLOCK_N)
    for start in tl.range(0, end_whole, BLOCK_N):
        keys = tl.load(key_ptrs + start * past_key_n * HEAD_DIM, mask=in_head, other=0.0)
        values = tl.load(value_ptrs + start * past_value_n * HEAD_DIM, mask=in_head, other=0.0)
        m_i, l_i, acc = _attend(query, keys, values, None, m_i, l_i, acc)
    for start in tl.range(end_whole, length, BLOCK_N):
        inside = start + t < length
        block = inside[:, None] & in_head
        keys = tl.load(key_ptrs + start * past_key_n * HEAD_DIM, mask=block, other=0.0)
        values = tl.load(value_ptrs + start * past_value_n * HEAD_DIM, mask=block, other=0.0)
        visible = in_tile[:, None] & inside[None, :]
        if has_visible != 0:
            visible_ptrs = visible_ptr + (row.to(tl.int64) * visible_row)[:, None] + (start + t)[None, :]
            visible = visible & (tl.load(visible_ptrs, mask=visible, other=0) != 0)
        m_i, l_i, acc = _attend(query, keys, values, visible, m_i, l_i, acc)

    # New tokens of all rows that have a query here; a row sees its own.
    end_new = ((end - 1) // num_tokens + 1) * num_tokens
    for start in tl.range(first // num_tokens * num_tokens, end_new, BLOCK_N):
        j = start + t
        inside = j < end_new
        its_row = j // num_tokens
        token = j % num_tokens
        block = inside[:, None] & in_head
        keys = tl.load(
            key_ptr + head * stride_kh + (its_row.to(tl.int64) * stride_kb + token * stride_kn)[:, None] + d[None, :],
            mask=block,
            other=0.0,
        )
        values = tl.load(
            value_ptr + head * stride_vh + (its_row.to(tl.int64) * stride_vb + token * stride_vn)[:, None] + d[None, :],
            mask=block,
            other=0.0,
        )
        inside = inside & (tl.load(mask_ptr + j, mask=inside & (has_mask != 0), other=1) != 0)
        visible = inside[None, :] & (row[:, None] == its_row[None, :])
        m_i, l_i, acc = _attend(query, keys, values, visible, m_i, l_i, acc)

    output = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    # The output is [B, n, H, D] in memory.
    output_ptrs = output_ptr + ((i.to(tl.int64) * num_heads + head) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=in_tile[:, None] & in_head)
