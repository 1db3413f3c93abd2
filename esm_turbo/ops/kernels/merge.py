"""Triton kernel that joins the parts of a context with the new tokens. Imported only where it runs."""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.attention import LOG2E, LOWEST
from esm_turbo.ops.kernels.products import OPERAND

# The least total that is not 0, and a normal number in float32: others would make Triton compute in float64.
_LEAST_TOTAL: tl.constexpr = tl.constexpr(2.0e-38)


@triton.jit
def _dense(at, stride, row, d, inside):
    """Dense keys or values at rows of so many numbers, [rows, SIZE], zeros outside."""
    return tl.load(at + row[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def _highest_of_lanes(x, ROWS: tl.constexpr):
    """The highest of the lanes' x [16] for every row, in all lanes."""
    if ROWS == OPERAND:
        return x
    else:
        highest = tl.max(tl.reshape(x, (OPERAND // ROWS, ROWS)), 0)
        return tl.reshape(tl.broadcast_to(highest[None, :], (OPERAND // ROWS, ROWS)), (OPERAND,))


@triton.jit
def _sum_of_lanes(x, ROWS: tl.constexpr):
    """The sum of the lanes' x [16, n] for every row, in all lanes."""
    if ROWS == OPERAND:
        return x
    else:
        n: tl.constexpr = x.shape[1]
        total = tl.sum(tl.reshape(x, (OPERAND // ROWS, ROWS, n)), 0)
        return tl.reshape(tl.broadcast_to(total[None, :, :], (OPERAND // ROWS, ROWS, n)), (OPERAND, n))


@triton.jit
def _joined(query, keys, values, seen, highest, total, sums, PRECISION: tl.constexpr):
    """Adds the attention to dense tokens, of which a row sees those in `seen` [rows, tokens], to a running softmax."""
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * LOG2E
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(highest, tl.max(scores, 1))
    keep = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak[:, None])
    total = total * keep + tl.sum(weights, 1)
    sums = tl.dot(weights.to(query.dtype), values, sums * keep[:, None], input_precision=PRECISION)
    return peak, total, sums


@triton.jit
def merge(
    query_ptr,
    key_ptr,
    value_ptr,
    new_mask_ptr,
    protected_key_ptr,
    protected_value_ptr,
    protected_mask_ptr,
    partial_ptr,
    highest_ptr,
    total_ptr,
    value_map_ptr,
    value_mean_ptr,
    value_residual_ptr,
    output_ptr,
    stride_query_row,
    stride_query_head,
    stride_query_token,
    stride_key_row,
    stride_key_head,
    stride_key_token,
    stride_value_row,
    stride_value_head,
    stride_value_token,
    batch_size,
    num_tokens,
    num_rows,
    num_slots,
    blocks,
    share,
    most_parts,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PLACES: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
    SHARED: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attends to new and to protected tokens, joins the parts of the context, and maps the output back.

    Grid: (row tiles, heads, batch). A row is a new token of one row of the extension; a tile holds all new tokens of
    FLAT rows, and the grid's last dimension is 1, or with FLAT 0 those of one row. An operand has room for the tile's
    ROWS rows (a power of two, up to 16) in `16 / ROWS` lanes, which take turns with the parts, ROUNDS times. Protected
    keys and values are in the model's coordinates here. With OVERLAP, what is not made by `attend_context` is done
    while that still runs.
    """
    num_heads = tl.num_programs(1)
    head = tl.program_id(1)
    lanes: tl.constexpr = OPERAND // ROWS
    # Of contexts of their own, several rows each have slots of their own.
    apart: tl.constexpr = FLAT > 0 and not SHARED
    i = tl.arange(0, OPERAND)
    d = tl.arange(0, SIZE)
    in_head = d < HEAD_DIM
    if FLAT > 0:
        first_batch = tl.program_id(0) * FLAT
        num_new = FLAT * num_tokens
        batch = first_batch + i % ROWS // num_tokens
        token = i % ROWS % num_tokens
        known = (i % ROWS < num_new) & (batch < batch_size)
    else:
        first_batch = tl.program_id(2)
        num_new = num_tokens
        batch = tl.zeros_like(i) + first_batch
        token = tl.program_id(0) * OPERAND + i
        known = token < num_tokens
    context = batch * 0 if SHARED else batch
    place = (context * num_heads + head).to(tl.int64)
    inside = known[:, None] & in_head[None, :]
    # What will be wanted is asked for at once: a short kernel is waiting for memory.
    query_row = batch.to(tl.int64) * stride_query_row + token * stride_query_token
    query = _dense(query_ptr + head * stride_query_head, 1, query_row, d, inside)
    component = tl.arange(0, VALUE_PLACES)
    stored = component < VALUE_SIZE
    back = value_map_ptr + head * (VALUE_SIZE * HEAD_DIM) + component[:, None] * HEAD_DIM + d[None, :]
    back = tl.load(back, mask=stored[:, None] & in_head[None, :], other=0.0)
    mean = tl.load(value_mean_ptr + head * HEAD_DIM + d, mask=in_head, other=0.0)[None, :]
    if value_residual_ptr is not None:
        mean += _dense(value_residual_ptr, HEAD_DIM, place, d, inside).to(tl.float32)

    highest = tl.full((OPERAND,), LOWEST, tl.float32)
    total = tl.zeros((OPERAND,), tl.float32)
    sums = tl.zeros((OPERAND, SIZE), tl.float32)
    num_dense = num_new
    if protected_key_ptr is not None:
        num_dense += num_slots * FLAT if apart else num_slots
    # With few new tokens there is one round, of which nothing can be asked for ahead.
    for first in tl.range(0, num_dense, OPERAND, num_stages=1 if FLAT > 0 else 3):
        new = first + i
        if FLAT > 0:
            new_batch = first_batch + new // num_tokens
            new_token = new % num_tokens
        else:
            new_batch = batch
            new_token = new
        is_new = (new < num_new) & (new_batch < batch_size)
        there = is_new[:, None] & in_head[None, :]
        key_row = new_batch.to(tl.int64) * stride_key_row + new_token * stride_key_token
        value_row = new_batch.to(tl.int64) * stride_value_row + new_token * stride_value_token
        keys = _dense(key_ptr + head * stride_key_head, 1, key_row, d, there).to(query.dtype)
        values = _dense(value_ptr + head * stride_value_head, 1, value_row, d, there).to(query.dtype)
        seen = is_new
        if new_mask_ptr is not None:
            seen = seen & (tl.load(new_mask_ptr + new_batch * num_tokens + new_token, mask=is_new, other=0) != 0)
        seen = seen[None, :] & (batch[:, None] == new_batch[None, :])
        if protected_key_ptr is not None:
            slot = new - num_new
            is_slot = (slot >= 0) & (new < num_dense)
            if apart:
                slot_batch = first_batch + slot // num_slots
                slot = slot % num_slots
                is_slot = is_slot & (slot_batch < batch_size)
            else:
                slot_batch = context
            slot_there = is_slot[:, None] & in_head[None, :]
            slot_row = (slot_batch * num_heads + head).to(tl.int64) * num_slots + slot
            keys = tl.where(there, keys, _dense(protected_key_ptr, HEAD_DIM, slot_row, d, slot_there).to(query.dtype))
            slot_values = _dense(protected_value_ptr, HEAD_DIM, slot_row, d, slot_there).to(query.dtype)
            values = tl.where(there, values, slot_values)
            slot_seen = is_slot[None, :] & known[:, None]
            if apart:
                slot_seen = slot_seen & (batch[:, None] == slot_batch[None, :])
            if protected_mask_ptr is not None:
                slot_mask = protected_mask_ptr + batch[:, None] * num_slots + slot[None, :]
                slot_seen = slot_seen & (tl.load(slot_mask, mask=slot_seen, other=0) != 0)
            seen = seen | slot_seen
        highest, total, sums = _joined(query, keys, values, seen, highest, total, sums, PRECISION)

    row = batch * num_tokens + token if SHARED else token
    item = (context * num_heads + head) * tl.cdiv(num_rows, QUERIES) + row // QUERIES
    count = ((item + 1) * blocks - 1) // share - item * blocks // share + 1
    lane = i // ROWS
    part = lane[:, None] + tl.arange(0, ROUNDS)[None, :] * lanes
    is_part = known[:, None] & (part < count[:, None])
    first_row = place * most_parts * num_rows + row
    part_row = first_row[:, None] + part * num_rows
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    part_highest = tl.load(highest_ptr + part_row, mask=is_part, other=LOWEST)
    part_total = tl.load(total_ptr + part_row, mask=is_part, other=0.0)
    peak = tl.maximum(highest, _highest_of_lanes(tl.max(part_highest, 1), ROWS))
    keep = tl.exp2(highest - peak)
    lane_total = tl.sum(tl.exp2(part_highest - peak[:, None]) * part_total, 1)
    weighed = tl.zeros((OPERAND, VALUE_PLACES), tl.float32)
    for s in tl.static_range(ROUNDS):
        part = s * lanes + lane
        is_part = known & (part < count)
        part_row = first_row + part * num_rows
        part_keep = tl.exp2(tl.load(highest_ptr + part_row, mask=is_part, other=LOWEST) - peak)
        sums_at = partial_ptr + part_row[:, None] * VALUE_SIZE + component[None, :]
        weighed += part_keep[:, None] * tl.load(sums_at, mask=is_part[:, None] & stored[None, :], other=0.0)
    mapped = tl.dot(weighed, back, lane_total[:, None] * mean, input_precision=PRECISION)
    sums = sums * keep[:, None] + _sum_of_lanes(mapped, ROWS)
    total = total * keep + tl.sum(_sum_of_lanes(lane_total[:, None], ROWS), 1)

    result = sums / tl.maximum(total, _LEAST_TOTAL)[:, None]
    output_row = ((batch.to(tl.int64) * num_tokens + token) * num_heads + head) * HEAD_DIM
    tl.store(
        output_ptr + output_row[:, None] + d[None, :],
        result.to(output_ptr.dtype.element_ty),
        mask=inside & (lane == 0)[:, None],
    )
