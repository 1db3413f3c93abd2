"""Triton kernel that copies many tensors in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows(source_ptr, target_ptr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copies rows of bytes, of any number of tensors; zeros the rest of the target's. Grid: (tensors, programs).

    An entry of either table, int64 [tensors, 4], has a tensor's address, the number of its rows, bytes per row, and
    bytes from one row to the next. UNIT bytes are copied at a time, 1 or 4.
    """
    source_ptr += 4 * tl.program_id(0)
    target_ptr += 4 * tl.program_id(0)
    dtype: tl.constexpr = tl.int32 if UNIT == 4 else tl.uint8
    source = tl.load(source_ptr).to(tl.pointer_type(dtype))
    target = tl.load(target_ptr).to(tl.pointer_type(dtype))
    rows, size = tl.load(source_ptr + 1), tl.load(source_ptr + 2) // UNIT
    source_stride, target_stride = tl.load(source_ptr + 3) // UNIT, tl.load(target_ptr + 3) // UNIT
    target_size = tl.load(target_ptr + 2) // UNIT
    count = tl.load(target_ptr + 1) * target_size
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < count
        row, column = i // target_size, i % target_size
        x = tl.load(source + row * source_stride + column, mask=inside & (row < rows) & (column < size), other=0)
        tl.store(target + row * target_stride + column, x, mask=inside)
