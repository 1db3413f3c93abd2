"""A decode kernel with the structure that the TurboESM paper describes, as a baseline.

One program per head loops over the whole context with one query, gathers the level of every component from a look-up
table in memory, adds the sign correction, and keeps an online softmax (paper, section 3.5). It reads the codes of the
preset `paper`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode(
    query_ptr, key_ptr, value_ptr, key_table_ptr, value_table_ptr, output_ptr, columns, D: tl.constexpr, T: tl.constexpr
):
    head = tl.program_id(0)
    place = tl.program_id(1) * tl.num_programs(0) + head
    d = tl.arange(0, D)
    query = tl.load(query_ptr + place * D + d).to(tl.float32)
    highest, total = -1.0e30, 0.0
    sums = tl.zeros((D,), tl.float32)
    for first in range(0, columns, T):
        token = first + tl.arange(0, T)
        there = token < columns
        at = (place.to(tl.int64) * columns + token)[:, None] * (D // 2) + (d // 2)[None, :]
        shift = (d % 2 * 4)[None, :]
        codes = (tl.load(key_ptr + at, mask=there[:, None], other=0).to(tl.int32) >> shift) & 15
        keys = tl.load(key_table_ptr + head * 16 + codes)
        scores = tl.where(there, tl.sum(keys * query[None, :], 1), float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 0))
        keep = tl.exp(highest - peak)
        weights = tl.exp(scores - peak)
        codes = (tl.load(value_ptr + at, mask=there[:, None], other=0).to(tl.int32) >> shift) & 15
        values = tl.load(value_table_ptr + head * 16 + codes)
        sums = sums * keep + tl.sum(values * weights[:, None], 0)
        total = total * keep + tl.sum(weights, 0)
        highest = peak
    tl.store(output_ptr + place * D + d, sums / total)


def decode(query: Tensor, keys: Tensor, values: Tensor, key_table: Tensor, value_table: Tensor) -> Tensor:
    """Attention of one mapped query per head to packed keys and values.

    Args:
        query: rotated, [B, H, 1, D].
        keys: four-bit fields, uint8 [B, H, L, D / 2].
        values: likewise.
        key_table: value of each field, float32 [H, 16].
        value_table: likewise.

    Returns:
        Float32 [B, H, 1, D], in the space of the stored values.
    """
    batch_size, heads, _, head_dim = query.shape
    output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    _decode[heads, batch_size](
        query, keys, values, key_table, value_table, output, keys.shape[2], D=head_dim, T=64, num_warps=4
    )
    return output
