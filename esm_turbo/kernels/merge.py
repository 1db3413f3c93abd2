"""Triton kernel that joins the splits of a context with the new tokens. Imported only where it runs."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention import LOG2E, LOWEST
from .products import OPERAND

# The least total that is not 0, and a normal number in float32: others would make Triton compute in float64.
_LEAST_TOTAL: tl.constexpr = tl.constexpr(2.0e-38)


@triton.jit
def _dense(at, stride, row, d, inside):
    """Dense keys or values at rows of so many numbers, [rows, SIZE], zeros outside."""
    return tl.load(at + row[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def _joined(query, keys, values, seen, highest, total, sums, PRECISION: tl.constexpr):
    """Adds the attention to dense tokens, of which a row sees those in `seen` [rows, tokens], to a running softmax."""
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION) * LOG2E
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(highest, tl.max(scores, 1))
    keep = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak[:, None])
    total = total * keep + tl.sum(weights, 1)
    values = values.to(query.dtype)
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
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PLACES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_PLACES: tl.constexpr,
    SHARED: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Joins the splits of a context, its protected tokens and the new tokens, and maps the output back.

    Grid: (row tiles, heads, batch). A row is a new token of one row of the extension; a tile holds all new tokens of
    FLAT rows, and the grid's last dimension is 1, or with FLAT 0 those of one row. Protected keys and values are in the
    model's coordinates here. With OVERLAP, all but the splits is loaded while `attend_context` still runs.
    """
    num_heads = tl.num_programs(1)
    head = tl.program_id(1)
    i = tl.arange(0, OPERAND)
    if FLAT > 0:
        tile_rows = FLAT * num_tokens
        row = tl.program_id(0) * tile_rows + i
        known = (i < tile_rows) & (row < batch_size * num_tokens)
        batch = (row // num_tokens).to(tl.int64)
        token = row % num_tokens
    else:
        batch = tl.zeros_like(i).to(tl.int64) + tl.program_id(2)
        token = tl.program_id(0) * OPERAND + i
        known = token < num_tokens
    context = batch * 0 if SHARED else batch
    place = context * num_heads + head
    d = tl.arange(0, SIZE)
    in_head = d < HEAD_DIM
    inside = known[:, None] & in_head[None, :]
    at = batch * stride_query_row + head * stride_query_head + token * stride_query_token
    query = _dense(query_ptr, 1, at, d, inside)
    mean = tl.load(value_mean_ptr + head * HEAD_DIM + d, mask=in_head, other=0.0)[None, :]
    if value_residual_ptr is not None:
        mean += _dense(value_residual_ptr, HEAD_DIM, place, d, inside).to(tl.float32)

    # What will be wanted is asked for at once: a short kernel is waiting for memory.
    key_ptr += head * stride_key_head
    value_ptr += head * stride_value_head
    new = token if FLAT > 0 else i
    seen = known if FLAT > 0 else i < num_tokens
    there = seen[:, None] & in_head[None, :]
    keys = _dense(key_ptr, 1, batch * stride_key_row + new * stride_key_token, d, there)
    values = _dense(value_ptr, 1, batch * stride_value_row + new * stride_value_token, d, there)
    # Of contexts of their own, rows take a slot each at a time, and see their own one alone.
    apart: tl.constexpr = FLAT > 0 and not SHARED
    slot = tl.zeros_like(i) if apart else i
    if protected_key_ptr is not None:
        first_slot = place * num_slots
        slot_inside = (known if apart else slot < num_slots)[:, None] & in_head[None, :]
        slot_keys = _dense(protected_key_ptr, HEAD_DIM, first_slot + slot, d, slot_inside)
        slot_values = _dense(protected_value_ptr, HEAD_DIM, first_slot + slot, d, slot_inside)
    component = tl.arange(0, VALUE_PLACES)
    stored = component < VALUE_SIZE
    back = value_map_ptr + head * (VALUE_SIZE * HEAD_DIM) + component[:, None] * HEAD_DIM + d[None, :]
    back = tl.load(back, mask=stored[:, None] & in_head[None, :], other=0.0)

    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    first_row = place * SPLITS * num_rows + (batch * num_tokens if SHARED else batch * 0) + token
    split = tl.arange(0, SPLIT_PLACES)
    part = first_row[:, None] + split[None, :] * num_rows
    is_part = known[:, None] & (split < SPLITS)[None, :]
    part_highest = tl.load(highest_ptr + part, mask=is_part, other=LOWEST)
    part_total = tl.load(total_ptr + part, mask=is_part, other=0.0)
    highest = tl.max(part_highest, 1)
    total = tl.sum(tl.exp2(part_highest - highest[:, None]) * part_total, 1)
    weighed = tl.zeros((OPERAND, VALUE_PLACES), tl.float32)
    for s in tl.static_range(SPLITS):
        split_row = first_row + s * num_rows
        split_keep = tl.exp2(tl.load(highest_ptr + split_row, mask=known, other=LOWEST) - highest)
        parts = partial_ptr + split_row[:, None] * VALUE_SIZE + component[None, :]
        weighed += split_keep[:, None] * tl.load(parts, mask=known[:, None] & stored[None, :], other=0.0)
    sums = tl.dot(weighed, back, total[:, None] * mean, input_precision=PRECISION)

    if new_mask_ptr is not None:
        seen = seen & (tl.load(new_mask_ptr + batch * num_tokens + new, mask=seen, other=0) != 0)
    same = batch[:, None] == batch[None, :]
    highest, total, sums = _joined(query, keys, values, same & seen[None, :], highest, total, sums, PRECISION)
    if FLAT == 0:
        for first in range(OPERAND, num_tokens, OPERAND):
            new = first + i
            seen = new < num_tokens
            there = seen[:, None] & in_head[None, :]
            keys = _dense(key_ptr, 1, batch * stride_key_row + new * stride_key_token, d, there)
            values = _dense(value_ptr, 1, batch * stride_value_row + new * stride_value_token, d, there)
            if new_mask_ptr is not None:
                seen = seen & (tl.load(new_mask_ptr + batch * num_tokens + new, mask=seen, other=0) != 0)
            highest, total, sums = _joined(query, keys, values, seen[None, :], highest, total, sums, PRECISION)
    if protected_key_ptr is not None:
        step: tl.constexpr = 1 if apart else OPERAND
        own = (i[:, None] == i[None, :]) if apart else (i[:, None] >= 0)
        for first in range(0, num_slots, step):
            slot_seen = own & known[:, None] & (slot + first < num_slots)[None, :]
            if protected_mask_ptr is not None:
                slot_mask = protected_mask_ptr + batch[:, None] * num_slots + (slot + first)[None, :]
                slot_seen = slot_seen & (tl.load(slot_mask, mask=slot_seen, other=0) != 0)
            following = slot + first + step
            is_slot = slot_inside & (following < num_slots)[:, None]
            next_keys = _dense(protected_key_ptr, HEAD_DIM, first_slot + following, d, is_slot)
            next_values = _dense(protected_value_ptr, HEAD_DIM, first_slot + following, d, is_slot)
            highest, total, sums = _joined(query, slot_keys, slot_values, slot_seen, highest, total, sums, PRECISION)
            slot_keys = next_keys
            slot_values = next_values

    result = sums / tl.maximum(total, _LEAST_TOTAL)[:, None]
    at = output_ptr + ((batch * num_tokens + token) * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, result.to(output_ptr.dtype.element_ty), mask=inside)
