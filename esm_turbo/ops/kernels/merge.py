"""Triton kernel that combines the parts of a context with the new tokens. Imported only where it runs."""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.attention import LOG2E, LOWEST
from esm_turbo.ops.kernels.products import MMA_ROWS, dot
from esm_turbo.ops.kernels.queries import read_tile, row_and_token

# A positive total that is a normal number in float32: Triton would compute with a subnormal one in float64.
_MIN_TOTAL: tl.constexpr = tl.constexpr(2.0e-38)
# Dense tokens that a single query attends to at once: as a rule one new token and two protected ones.
_FEW_TOKENS: tl.constexpr = tl.constexpr(4)
# Bytes that one prefetch instruction fetches.
_PREFETCH_BYTES: tl.constexpr = tl.constexpr(64)
# Numbers of accumulators that are loaded at once, and beside many other programs.
_LOADED: tl.constexpr = tl.constexpr(1024)
_CROWDED_LOADED: tl.constexpr = tl.constexpr(256)


@triton.jit
def _prefetch(ptr, bytes_there, BYTES: tl.constexpr):
    """Prefetches memory to the L2 cache; BYTES is a power of two, and at least `bytes_there`."""
    first = tl.minimum(tl.arange(0, BYTES // _PREFETCH_BYTES) * _PREFETCH_BYTES, bytes_there - 1)
    lines = ptr.to(tl.int64) + first
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y, [rows, n]; a single row takes no tensor core."""
    if x.shape[0] == 1:
        return acc + tl.sum(tl.trans(x).to(tl.float32) * y.to(tl.float32), 0)[None, :]
    else:
        return dot(x, y, acc, PRECISION)


@triton.jit
def _load_rows(ptr, row, d, inside):
    """Rows of dense keys or values that begin at `row`, [rows, SIZE], zeros outside."""
    return tl.load(ptr + row[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def _load_map(map_ptr, component, d, stride_part, HEAD_DIM: tl.constexpr):
    """A head's map from sums of fields to the output, [components, SIZE], zeros outside."""
    map_ptrs = map_ptr + component[:, None] * HEAD_DIM + d[None, :]
    in_map = (d < HEAD_DIM)[None, :] & (component < stride_part)[:, None]
    return tl.load(map_ptrs, mask=in_map, other=0.0)


@triton.jit
def _attend_dense(
    first_query,
    end_query,
    first_batch,
    read,
    head,
    num_heads,
    num_tokens,
    query_ptr,
    key_ptr,
    value_ptr,
    new_mask_ptr,
    protected_key_ptr,
    protected_value_ptr,
    protected_mask_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    num_slots,
    has_new_mask,
    has_protected_mask,
    protected_by_row,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of queries to the new tokens of their rows and to the protected tokens of their context.

    Queries are numbered from the first one of row `first_batch` of the extension on. `num_slots` protected tokens are
    given, in the model's coordinates, for each context, of which the queries `read` one, or for each row.

    Returns:
        Maxima and totals of the running softmax, [BLOCK_M], and the weighted sums of values, [BLOCK_M, SIZE].
    """
    tokens: tl.constexpr = _FEW_TOKENS if BLOCK_M == 1 else MMA_ROWS
    query = tl.minimum(first_query + tl.arange(0, BLOCK_M), end_query - 1)
    query_batch, query_token = row_and_token(query, num_tokens, BLOCK_M)
    # The new tokens of all rows of which there are queries.
    first_row, _ = row_and_token(first_query, num_tokens, BLOCK_M)
    last_row, _ = row_and_token(end_query - 1, num_tokens, BLOCK_M)
    first_new = first_row * num_tokens
    num_new = (last_row + 1) * num_tokens - first_new
    query_batch += first_batch
    d = tl.arange(0, SIZE)
    i = tl.arange(0, tokens)
    in_head = (d < HEAD_DIM)[None, :]
    query_row = query_batch.to(tl.int64) * stride_qb + query_token * stride_qn
    x = _load_rows(query_ptr + head * stride_qh, query_row, d, in_head)  # [BLOCK_M, SIZE]
    query_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, SIZE), tl.float32)
    stored = tl.where(protected_by_row != 0, first_row, read)
    slot_head = (stored * num_heads + head).to(tl.int64) * num_slots
    for first in tl.range(0, num_new + num_slots, tokens, num_stages=1):
        is_new = first + i < num_new
        batch, token = row_and_token(first_new + first + i, num_tokens, BLOCK_M)
        batch += first_batch
        inside = is_new[:, None] & in_head
        key_row = batch.to(tl.int64) * stride_kb + token * stride_kn
        value_row = batch.to(tl.int64) * stride_vb + token * stride_vn
        keys = _load_rows(key_ptr + head * stride_kh, key_row, d, inside).to(x.dtype)  # [tokens, SIZE]
        values = _load_rows(value_ptr + head * stride_vh, value_row, d, inside).to(x.dtype)
        mask_ptrs = new_mask_ptr + batch.to(tl.int64) * num_tokens + token
        is_seen = is_new & (tl.load(mask_ptrs, mask=is_new & (has_new_mask != 0), other=1) != 0)
        slot = first + i - num_new
        is_slot = (slot >= 0) & (slot < num_slots)
        inside = is_slot[:, None] & in_head
        slot_keys = _load_rows(protected_key_ptr, (slot_head + slot) * HEAD_DIM, d, inside).to(x.dtype)
        slot_values = _load_rows(protected_value_ptr, (slot_head + slot) * HEAD_DIM, d, inside).to(x.dtype)
        keys = tl.where(is_slot[:, None], slot_keys, keys)
        values = tl.where(is_slot[:, None], slot_values, values)
        mask_ptrs = protected_mask_ptr + query_batch[:, None].to(tl.int64) * num_slots + slot[None, :]
        slot_mask = tl.load(mask_ptrs, mask=is_slot[None, :] & (has_protected_mask != 0), other=1)
        visible = is_seen[None, :] & (query_batch[:, None] == batch[None, :])
        visible = visible | (is_slot[None, :] & (slot_mask != 0))
        scores = _product(x, tl.trans(keys), tl.zeros((BLOCK_M, tokens), tl.float32), PRECISION) * LOG2E
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(query_max, tl.max(scores, 1))
        rescale = tl.exp2(query_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        l_i = l_i * rescale + tl.sum(weights, 1)
        acc = _product(weights.to(x.dtype), values, acc * rescale[:, None], PRECISION)
        query_max = new_max
    return query_max, l_i, acc


@triton.jit(do_not_specialize_on_alignment=["new_mask_ptr", "protected_mask_ptr", "tile_ptr", "part_total_ptr"])
def merge(
    query_ptr,
    key_ptr,
    value_ptr,
    new_mask_ptr,
    protected_key_ptr,
    protected_value_ptr,
    protected_mask_ptr,
    tile_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_total_ptr,
    value_map_ptr,
    value_scale_ptr,
    value_middle_ptr,
    mean_ptr,
    value_residual_ptr,
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
    stride_part,
    num_tokens,
    num_rows,
    num_row_tiles,
    num_heads,
    num_slots,
    num_blocks,
    blocks_per_program,
    max_parts,
    has_tiles,
    has_new_mask,
    has_protected_mask,
    protected_by_row,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    CROWDED: tl.constexpr,
):
    """Attends to new and protected tokens, combines this with the parts of the context, and maps the output back.

    For a query with maximum m, total t and accumulator a over dense tokens, and m_p, t_p, a_p of the parts p:

        max    = max(m, max_p m_p)
        total  = 2^(m - max) t + sum_p 2^(m_p - max) t_p
        output = (2^(m - max) a + sum_p 2^(m_p - max) (T^-1 a_p + t_p (mean + residual))) / total

    Grid: (items,). An item is a tile of BLOCK_M rows of one head of one context, as in `attend_context`, which
    describes the arguments. Accumulators of the parts are `stride_part` apart, the sum of the operands' sizes, up to
    VALUE_SIZE. `num_slots` protected keys and values of a context, in the model's coordinates, are given per context,
    or, where this is `protected_by_row`, per row of the extension. Masks are read if there are any. With OVERLAP,
    everything that does not depend on `attend_context` is done while it still runs, and the next kernel may begin with
    what does not depend on this one. If they are CROWDED, programs load fewer numbers at once, and the next kernel
    waits: a next call of `attend_context`, begun beside many programs, was measured to run slower.
    """
    if OVERLAP and not CROWDED:
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0)
    num_parts = ((item + 1) * num_blocks - 1) // blocks_per_program - item * num_blocks // blocks_per_program + 1
    context_head = item // num_row_tiles
    row_tile = item % num_row_tiles
    head = context_head % num_heads
    context = context_head // num_heads
    read, first_query, end_query = read_tile(tile_ptr, row_tile, context, num_rows, has_tiles, BLOCK_M)
    end_query = tl.minimum(end_query, first_query + BLOCK_M)
    # A tile without queries writes nothing.
    if first_query < end_query:
        d = tl.arange(0, SIZE)
        in_head = d < HEAD_DIM
        mean = tl.load(mean_ptr + (num_heads + head) * HEAD_DIM + d, mask=in_head, other=0.0)
        if value_residual_ptr is not None:
            residual_ptr = value_residual_ptr + (read * num_heads + head).to(tl.int64) * HEAD_DIM
            mean += tl.load(residual_ptr + d, mask=in_head, other=0.0).to(tl.float32)
        component = tl.arange(0, VALUE_SIZE)
        map_ptr = value_map_ptr + head * (VALUE_SIZE * HEAD_DIM)
        map_scale = tl.load(value_scale_ptr + head)
        middle = tl.load(value_middle_ptr + component)
        # Several parts at a time, in copies of the queries.
        copies: tl.constexpr = max(1, (_CROWDED_LOADED if CROWDED else _LOADED) // (BLOCK_M * VALUE_SIZE))
        rows: tl.constexpr = copies * BLOCK_M
        # Copies of a single query that fill one operand of a tensor core are mapped before they are added up.
        fills_operand: tl.constexpr = BLOCK_M == 1 and rows == MMA_ROWS and not CROWDED
        # Elsewhere the map takes too many registers to be loaded before it is needed; programs of other contexts then
        # find it in the L2 cache.
        if OVERLAP and not fills_operand and context == 0:
            entry: tl.constexpr = map_ptr.dtype.element_ty.primitive_bitwidth // 8
            _prefetch(map_ptr, VALUE_SIZE * HEAD_DIM * entry, VALUE_SIZE * SIZE * entry)
        dense_max, dense_total, dense_acc = _attend_dense(
            first_query, end_query, context, read, head, num_heads, num_tokens, query_ptr, key_ptr, value_ptr,
            new_mask_ptr, protected_key_ptr, protected_value_ptr, protected_mask_ptr, stride_qb, stride_qh, stride_qn,
            stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, num_slots, has_new_mask,
            has_protected_mask, protected_by_row, HEAD_DIM, SIZE, BLOCK_M, PRECISION,
        )  # fmt: skip
        i = tl.arange(0, rows)
        query = first_query + i % BLOCK_M
        first_row = context_head.to(tl.int64) * max_parts * num_rows + query
        row_max = tl.full((rows,), LOWEST, tl.float32)
        l_i = tl.zeros((rows,), tl.float32)
        acc = tl.zeros((rows, VALUE_SIZE), tl.float32)
        if fills_operand:
            value_map = _load_map(map_ptr, component, d, stride_part, HEAD_DIM)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for first in tl.range(0, num_parts, copies, num_stages=1):
            part = first + i // BLOCK_M
            is_part = (query < end_query) & (part < num_parts)
            part_row = first_row + part * num_rows
            part_max = tl.load(part_max_ptr + part_row, mask=is_part, other=LOWEST)
            part_total = tl.load(part_total_ptr + part_row, mask=is_part, other=0.0)
            acc_ptrs = part_acc_ptr + part_row[:, None] * stride_part + component[None, :]
            part_acc = tl.load(acc_ptrs, mask=is_part[:, None] & (component < stride_part)[None, :], other=0.0)
            new_max = tl.maximum(row_max, part_max)
            rescale = tl.exp2(row_max - new_max)
            weight = tl.exp2(part_max - new_max)
            l_i = l_i * rescale + part_total * weight
            acc = acc * rescale[:, None] + part_acc * weight[:, None]
            row_max = new_max

        max_by_copy = tl.reshape(row_max, (copies, BLOCK_M))
        m_i = tl.maximum(tl.max(max_by_copy, 0), dense_max)  # [BLOCK_M]
        weight = tl.exp2(max_by_copy - m_i[None, :])
        rescale = tl.exp2(dense_max - m_i)
        if fills_operand:
            acc = (acc - l_i[:, None] * middle[None, :]) * (tl.reshape(weight, (rows,)) * map_scale)[:, None]
            mapped = dot(acc, value_map.to(tl.float32), tl.zeros((rows, SIZE), tl.float32), PRECISION)
            l_i = tl.sum(l_i[:, None] * weight, 0)
            output = tl.sum(mapped, 0)[None, :] + l_i[:, None] * mean[None, :]
        else:
            l_i = tl.sum(tl.reshape(l_i, (copies, BLOCK_M)) * weight, 0)
            acc = tl.sum(tl.reshape(acc, (copies, BLOCK_M, VALUE_SIZE)) * weight[:, :, None], 0)
            value_map = _load_map(map_ptr, component, d, stride_part, HEAD_DIM).to(tl.float32)
            acc = (acc - l_i[:, None] * middle[None, :]) * map_scale
            output = _product(acc, value_map, l_i[:, None] * mean[None, :], PRECISION)
        output += dense_acc * rescale[:, None]
        output /= tl.maximum(l_i + dense_total * rescale, _MIN_TOTAL)[:, None]
        # [B, n, H, D]: the queries of a context follow each other.
        query = first_query + tl.arange(0, BLOCK_M)
        output_row = ((context.to(tl.int64) * num_tokens + query) * num_heads + head) * HEAD_DIM
        inside = (query < end_query)[:, None] & in_head[None, :]
        tl.store(output_ptr + output_row[:, None] + d[None, :], output.to(output_ptr.dtype.element_ty), mask=inside)
