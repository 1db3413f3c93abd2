"""Triton kernel that combines the parts of a context with the new tokens. Imported only where it runs."""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.attention import LOG2E, LOWEST
from esm_turbo.ops.kernels.products import MMA_ROWS

# A positive total that is a normal number in float32: Triton would compute with a subnormal one in float64.
_MIN_TOTAL: tl.constexpr = tl.constexpr(2.0e-38)


@triton.jit
def _load_rows(ptr, stride, row, d, inside):
    """Rows of dense keys, values or queries, [rows, SIZE], zeros outside."""
    return tl.load(ptr + row[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def _max_over_copies(x, ROWS: tl.constexpr):
    """The maximum of x [16] over the copies of each row, in all copies."""
    if ROWS == MMA_ROWS:
        return x
    else:
        highest = tl.max(tl.reshape(x, (MMA_ROWS // ROWS, ROWS)), 0)
        return tl.reshape(tl.broadcast_to(highest[None, :], (MMA_ROWS // ROWS, ROWS)), (MMA_ROWS,))


@triton.jit
def _sum_over_copies(x, ROWS: tl.constexpr):
    """The sum of x [16, n] over the copies of each row, in all copies."""
    if ROWS == MMA_ROWS:
        return x
    else:
        n: tl.constexpr = x.shape[1]
        total = tl.sum(tl.reshape(x, (MMA_ROWS // ROWS, ROWS, n)), 0)
        return tl.reshape(tl.broadcast_to(total[None, :, :], (MMA_ROWS // ROWS, ROWS, n)), (MMA_ROWS, n))


@triton.jit
def _attend_dense(query, keys, values, visible, row_max, total, acc, PRECISION: tl.constexpr):
    """One step of the running softmax over dense tokens, of which a row sees those in `visible` [rows, tokens]."""
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * LOG2E
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(query.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
    return new_max, total, acc


@triton.jit(do_not_specialize_on_alignment=["new_mask_ptr", "protected_mask_ptr", "shift_ptr", "part_total_ptr"])
def merge(
    query_ptr,
    key_ptr,
    value_ptr,
    new_mask_ptr,
    protected_key_ptr,
    protected_value_ptr,
    protected_mask_ptr,
    shift_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_total_ptr,
    value_map_ptr,
    value_mean_ptr,
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
    batch_size,
    num_tokens,
    num_rows,
    num_row_tiles,
    num_slots,
    num_blocks,
    blocks_per_program,
    max_parts,
    queries,
    batch_tile,
    own_context,
    has_shifts,
    has_new_mask,
    has_protected_mask,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
    MANY: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attends to new and protected tokens, combines this with the parts of the context, and maps the output back.

    For a query with maximum m, total t and accumulator a over dense tokens, and m_p, t_p, a_p of the parts p:

        max    = max(m, max_p m_p)
        total  = 2^(m - max) t + sum_p 2^(m_p - max) t_p
        output = (2^(m - max) a + sum_p 2^(m_p - max) (T^-1 a_p + t_p (mean + residual))) / total

    Grid: (batch tiles, heads, row tiles). A row is a new token of one row of the extension. A tile holds all new tokens
    of `batch_tile` rows of the extension; with MANY new tokens it holds 16 tokens of a single row. An operand holds
    ROWS rows (1 or 16) in `16 / ROWS` copies, which process different parts, ROUNDS at a time. `attend_context` has
    read `queries` queries at a time. All rows share one context, unless they each have their `own_context`: what is
    stored per context is then given per row. Rows that name their contexts also have shifts, by which they find their
    tile of the queries of all contexts (`row_index.Tiles`). Masks are read if there are any. Accumulators of the parts
    are `stride_part` apart, the sum of the operands' sizes, up to VALUE_SIZE. Protected keys and values are in the
    model's coordinates. With OVERLAP, everything that does not depend on `attend_context` is done while it still runs.
    """
    num_heads = tl.num_programs(1)
    head = tl.program_id(1)
    copies: tl.constexpr = MMA_ROWS // ROWS
    i = tl.arange(0, MMA_ROWS)
    d = tl.arange(0, SIZE)
    in_head = d < HEAD_DIM
    first_batch = tl.program_id(0) * batch_tile
    num_new = batch_tile * num_tokens
    tile_row = tl.program_id(2) * MMA_ROWS + i % ROWS
    batch = first_batch + tile_row // num_tokens
    token = tile_row % num_tokens
    in_rows = (tile_row < num_new) & (batch < batch_size)
    context = batch * own_context
    context_head = (context * num_heads + head).to(tl.int64)
    inside = in_rows[:, None] & in_head[None, :]
    # All loads are issued at once: a short kernel waits for memory most of its time.
    query_row = batch.to(tl.int64) * stride_qb + token * stride_qn
    query = _load_rows(query_ptr + head * stride_qh, 1, query_row, d, inside)  # [16, SIZE]
    component = tl.arange(0, VALUE_SIZE)
    in_values = component < stride_part
    map_ptrs = value_map_ptr + head * (VALUE_SIZE * HEAD_DIM) + component[:, None] * HEAD_DIM + d[None, :]
    value_map = tl.load(map_ptrs, mask=in_head[None, :], other=0.0)  # [VALUE_SIZE, SIZE]
    mean = tl.load(value_mean_ptr + head * HEAD_DIM + d, mask=in_head, other=0.0)[None, :]  # [1 or 16, SIZE]
    if value_residual_ptr is not None:
        mean += _load_rows(value_residual_ptr, HEAD_DIM, context_head, d, inside).to(tl.float32)

    row_max = tl.full((MMA_ROWS,), LOWEST, tl.float32)
    total = tl.zeros((MMA_ROWS,), tl.float32)
    acc = tl.zeros((MMA_ROWS, SIZE), tl.float32)
    # Rows that share a tile each have protected tokens of their own, unless they share the context.
    num_dense = num_new + num_slots * (1 + (batch_tile - 1) * own_context)
    # With few new tokens there is a single round, and nothing to load ahead.
    for first in tl.range(0, num_dense, MMA_ROWS, num_stages=3 if MANY else 1):
        new = first + i
        new_batch = first_batch + new // num_tokens
        new_token = new % num_tokens
        is_new = (new < num_new) & (new_batch < batch_size)
        new_inside = is_new[:, None] & in_head[None, :]
        key_row = new_batch.to(tl.int64) * stride_kb + new_token * stride_kn
        value_row = new_batch.to(tl.int64) * stride_vb + new_token * stride_vn
        keys = _load_rows(key_ptr + head * stride_kh, 1, key_row, d, new_inside).to(query.dtype)  # [16, SIZE]
        values = _load_rows(value_ptr + head * stride_vh, 1, value_row, d, new_inside).to(query.dtype)
        new_mask_ptrs = new_mask_ptr + new_batch.to(tl.int64) * num_tokens + new_token
        visible = is_new & (tl.load(new_mask_ptrs, mask=is_new & (has_new_mask != 0), other=1) != 0)
        visible = visible[None, :] & (batch[:, None] == new_batch[None, :])  # [16, 16]
        slot = new - num_new
        is_slot = (slot >= 0) & (new < num_dense)
        slot_batch = (first_batch + slot // tl.maximum(num_slots, 1)) * own_context
        slot = slot % tl.maximum(num_slots, 1)
        is_slot = is_slot & (slot_batch < batch_size)
        slot_inside = is_slot[:, None] & in_head[None, :]
        slot_row = (slot_batch * num_heads + head).to(tl.int64) * num_slots + slot
        slot_keys = _load_rows(protected_key_ptr, HEAD_DIM, slot_row, d, slot_inside).to(query.dtype)
        keys = tl.where(new_inside, keys, slot_keys)
        slot_values = _load_rows(protected_value_ptr, HEAD_DIM, slot_row, d, slot_inside).to(query.dtype)
        values = tl.where(new_inside, values, slot_values)
        slot_visible = is_slot[None, :] & in_rows[:, None]
        slot_visible = slot_visible & ((batch[:, None] == slot_batch[None, :]) | (own_context == 0))
        mask_ptrs = protected_mask_ptr + batch[:, None].to(tl.int64) * num_slots + slot[None, :]
        slot_mask = tl.load(mask_ptrs, mask=slot_visible & (has_protected_mask != 0), other=1)
        visible = visible | (slot_visible & (slot_mask != 0))
        row_max, total, acc = _attend_dense(query, keys, values, visible, row_max, total, acc, PRECISION)

    # As `attend_context` numbered them: rows that name their contexts as those of one.
    one = (own_context == 0) | (has_shifts != 0)
    row = tl.where(one, batch * num_tokens, 0) + token
    part_head = (tl.where(one, 0, batch) * num_heads + head).to(tl.int64)
    shift = tl.load(shift_ptr + batch, mask=in_rows & (has_shifts != 0), other=0)
    item = part_head.to(tl.int32) * num_row_tiles + (row + shift) // queries
    num_parts = ((item + 1) * num_blocks - 1) // blocks_per_program - item * num_blocks // blocks_per_program + 1
    copy = i // ROWS
    first_row = part_head * max_parts * num_rows + row
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    highest = row_max
    copy_total = tl.zeros((MMA_ROWS,), tl.float32)
    part_acc = tl.zeros((MMA_ROWS, VALUE_SIZE), tl.float32)
    for first in tl.range(0, tl.cdiv(max_parts, copies), ROUNDS, num_stages=1):
        part = copy[:, None] + (first + tl.arange(0, ROUNDS)[None, :]) * copies
        is_part = in_rows[:, None] & (part < num_parts[:, None])
        part_row = first_row[:, None] + part * num_rows
        part_max = tl.load(part_max_ptr + part_row, mask=is_part, other=LOWEST)  # [16, ROUNDS]
        part_total = tl.load(part_total_ptr + part_row, mask=is_part, other=0.0)
        new_max = tl.maximum(highest, _max_over_copies(tl.max(part_max, 1), ROWS))
        rescale = tl.exp2(highest - new_max)
        copy_total = copy_total * rescale + tl.sum(tl.exp2(part_max - new_max[:, None]) * part_total, 1)
        part_acc *= rescale[:, None]
        for s in tl.static_range(ROUNDS):
            part = copy + (first + s) * copies
            is_part = in_rows & (part < num_parts)
            part_row = first_row + part * num_rows
            part_rescale = tl.exp2(tl.load(part_max_ptr + part_row, mask=is_part, other=LOWEST) - new_max)
            acc_ptrs = part_acc_ptr + part_row[:, None] * stride_part + component[None, :]
            part_acc += part_rescale[:, None] * tl.load(acc_ptrs, mask=is_part[:, None] & in_values[None, :], other=0.0)
        highest = new_max
    rescale = tl.exp2(row_max - highest)
    mapped = tl.dot(part_acc, value_map, copy_total[:, None] * mean, input_precision=PRECISION)
    acc = acc * rescale[:, None] + _sum_over_copies(mapped, ROWS)
    total = total * rescale + tl.sum(_sum_over_copies(copy_total[:, None], ROWS), 1)

    output = acc / tl.maximum(total, _MIN_TOTAL)[:, None]
    output_row = ((batch.to(tl.int64) * num_tokens + token) * num_heads + head) * HEAD_DIM
    tl.store(
        output_ptr + output_row[:, None] + d[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=inside & (copy == 0)[:, None],
    )
