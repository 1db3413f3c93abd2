"""Lower bounds of calls on a device: empty launches, and launches that read and write what attention does.

Of the latter, the first reads as many words as a context has, and the map of a query; every program writes one part.
The second reads the parts of an item and the map of its output. All loads of a program are independent of each other,
so that memory answers them together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from esm_turbo.ops.triton_launch import overlaps

# As many programs as attention with a batch of one and 1,024 tokens: 20 heads of 16 blocks.
_PROGRAMS = 320
# Words that a program adds up side by side, and of which a part consists.
_WIDTH, _PART = 512, 64


@triton.jit
def _nothing():
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


def empty_launches(count: int) -> None:
    """Launch empty kernels, each of which may start before the previous one has finished."""
    for _ in range(count):
        _nothing[(_PROGRAMS,)](num_warps=1, launch_pdl=True)


@triton.jit
def _read_context(
    word_ptr, map_ptr, part_ptr, count, parts, heads, WIDTH: tl.constexpr, PART: tl.constexpr, MAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds up `count` words and the map of a head, and writes a part. Grid: (parts of all items,)."""
    program = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for first in tl.static_range(0, MAP, WIDTH):
        total += tl.load(map_ptr + program // parts % heads * MAP + first + i)
    word_ptr += program.to(tl.int64) * count
    for first in tl.range(0, count, WIDTH, loop_unroll_factor=4):
        total += tl.load(word_ptr + first + i, mask=first + i < count, other=0)
    part = tl.sum(tl.reshape(total, (WIDTH // PART, PART)), 0)
    tl.store(part_ptr + program * PART + tl.arange(0, PART), part)


@triton.jit
def _read_parts(
    map_ptr, part_ptr, output_ptr, heads, PARTS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
    MAP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of an item and the map of its head. Grid: (items,)."""
    item = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for first in tl.static_range(0, MAP, WIDTH):
        total += tl.load(map_ptr + item % heads * MAP + first + i)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    j = tl.arange(0, PART)
    rows = item * PARTS + tl.arange(0, PARTS)
    parts = tl.load(part_ptr + rows[:, None] * PART + j[None, :])
    output = tl.sum(tl.reshape(total, (WIDTH // PART, PART)), 0) + tl.sum(parts, 0)
    tl.store(output_ptr + item * PART + j, output)


def bare_reads(words: Tensor, query_map: Tensor, output_map: Tensor) -> Tensor:
    """Both launches.

    Args:
        words: of every item in parts, int32 [items, parts, n].
        query_map: of every head, int32 [H, m], of which every part reads its head's one.
        output_map: likewise, read once for an item.

    Returns:
        For column j of 64, the sum of all words j, j + 64, ... that belong to an item, int32 [items, 64].
    """
    items, parts, count = words.shape
    partial_sums = torch.empty(items * parts * _PART, dtype=torch.int32, device=words.device)
    output = torch.empty(items, _PART, dtype=torch.int32, device=words.device)
    overlap, heads = overlaps(words.device), len(query_map)
    options = {"OVERLAP": overlap, "num_warps": 1, "launch_pdl": overlap}
    _read_context[(items * parts,)](
        words, query_map, partial_sums, count, parts, heads, _WIDTH, _PART, query_map.shape[1], **options
    )
    _read_parts[(items,)](output_map, partial_sums, output, heads, parts, _WIDTH, _PART, output_map.shape[1], **options)
    return output
