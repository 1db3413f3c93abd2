"""The launches of `triton_attention.attend_packed`: what shapes, dtypes and the device decide of them.

Imports triton only when a kernel runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from esm_turbo.codecs.fitting.statistics import KEY_BLOCK
from esm_turbo.ops.slabs import SlabSpec
from esm_turbo.ops.stream_k import best_schedule
from esm_turbo.ops.triton_launch import Options, PreparedLaunch, Tuning, interpreted, strides_of
from esm_turbo.ops.triton_layout import next_power_of_two, num_slots

# Registers of each of a multiprocessor's four partitions, which do not share them; a thread has at most 255.
_PARTITION_REGISTERS = 16384
_MAX_REGISTERS = 256
# Assumed in the interpreter, where there are none.
_MULTIPROCESSORS = 132
# Rows of a tensor core's operand.
MMA_ROWS = 16
_SMALL_HEAD = 64


@dataclass(frozen=True)
class AttentionTuning(Tuning):
    """Tuning of the kernels that read contexts, see `Tuning`.

    `registers` limits the half-precision kernels without tables, for heads of up to 64 and up to eight queries; others
    leave it to the compiler. Fewer registers let more programs run at the same time.

    Attributes:
        prefetch_tiles: tiles per prefetch to the L2 cache, where groups and programs have several; 0 disables it.
        merge_warps: warps of a program of `merge`, for several queries.
    """

    prefetch_tiles: int = 2
    merge_warps: int = 4


class AttentionPlan(NamedTuple):
    """Launch settings that follow from the shapes of an extension.

    Attributes:
        attend_context: the first launch.
        merge: the second one.
        part_sizes: number of elements of the accumulators, of the maxima and of the totals of all parts.
        part_numel: their sum.
    """

    attend_context: PreparedLaunch
    merge: PreparedLaunch
    part_sizes: tuple[int, int, int]
    part_numel: int


@functools.lru_cache(maxsize=1024)
def attention_plan(
    tuning: AttentionTuning,
    shape: tuple[int, int, int, int],
    steps: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int, int],
    specs: tuple[tuple[int, ...], tuple[int, ...]],
    words: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]],
    maps: tuple[tuple[int, ...], tuple[int, ...]],
    named: tuple[int, int] | None,
    slots: tuple[int, int],
    masked: tuple[bool, bool, bool],
    has: tuple[bool, bool, bool, bool],
) -> AttentionPlan:
    """The launches of `attend_packed` for tensors of these shapes; the layers of a model share them.

    Args:
        tuning: of the kernels.
        shape: of the query.
        steps: strides of query, keys and values.
        dtype: of the query.
        device: of all tensors.
        sizes: number of contexts, of their columns, and of columns per head in memory.
        specs: `key_specs` and `value_specs`.
        words: dtypes of the words of the slabs of keys and of values.
        maps: shapes of the query's map and of the values' one.
        named: number of tiles and `most_queries`, where rows name their contexts.
        slots: of protected columns, and of protected tokens.
        masked: whether there are masks of new tokens, of protected tokens and of columns.
        has: whether there are tables, residuals and angles, and whether launches overlap.
    """
    import triton.language as tl

    from esm_turbo.ops.kernels.attention import attend_context
    from esm_turbo.ops.kernels.merge import merge

    batch_size, heads, n, head_dim = shape
    contexts, columns, slab_columns = sizes
    has_tables, has_residuals, rotated, overlap = has
    # Queries are numbered as those of one context also where rows name theirs.
    shared = named is not None or contexts != batch_size
    rows, numbered = (batch_size * n, 1) if shared else (n, contexts)
    half = dtype in (torch.float16, torch.bfloat16)
    # Tensor cores truncate float32 to 11 bits, which shows in all dtypes but bfloat16; three products are nearly exact.
    precision = "tf32" if dtype == torch.bfloat16 else "tf32x3"
    tiles, most_queries = named or (0, rows)
    queries, operand_rows = queries_at_once(most_queries)
    row_tiles = -(-rows // queries) if named is None else tiles
    items = numbered * heads * row_tiles
    warps = tuning.warps or 1
    registers = None
    if half and head_dim <= _SMALL_HEAD and operand_rows < MMA_ROWS and not has_tables:
        registers = tuning.registers
    programs = _concurrent_programs(device, warps, registers or _MAX_REGISTERS)
    blocks, blocks_per_program, max_parts = best_schedule(
        items, -(-columns // KEY_BLOCK), tuning.programs or programs, _multiprocessors(device), queries == 1
    )
    keys_spec, values_spec = map(_specs, specs)
    key_size, value_size = maps[0][2], sum(spec.size for spec in values_spec)
    count = numbered * heads * max_parts * rows
    query_strides, key_strides, value_strides = (
        strides_of(name, shape, own) for name, own in zip("qkv", steps, strict=True)
    )
    # What both kernels are told.
    both: dict[str, Any] = {
        **query_strides,
        "num_tokens": n,
        "num_rows": rows,
        "num_row_tiles": row_tiles,
        "num_heads": heads,
        "num_blocks": blocks,
        "blocks_per_program": blocks_per_program,
        "max_parts": max_parts,
        "has_tiles": int(named is not None),
        "HEAD_DIM": head_dim,
        "BLOCK_M": queries,
        "PRECISION": precision,
        "OVERLAP": overlap,
    }
    context_launch = PreparedLaunch(
        attend_context,
        (-(-items * blocks // blocks_per_program), 1, 1),
        device,
        Options(warps, tuning.stages, registers, overlap),
        **both,
        **({} if has_residuals else {"key_residual_ptr": None}),
        key_slab_ptrs=words[0],
        value_slab_ptrs=words[1],
        slab_columns=slab_columns,
        num_columns=columns,
        num_items=items,
        num_slots=slots[0],
        has_mask=int(masked[2]),
        HALF=maps[0][3],
        KEYS=keys_spec,
        VALUES=values_spec,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        ROWS=operand_rows,
        SLOTS=num_slots(slots[0]),
        ROTATED=rotated,
        PREFETCH_TILES=tuning.prefetch_tiles if queries < operand_rows else 0,
        BLOCK_N=tuning.tile,
        TILES_PER_BLOCK=KEY_BLOCK // tuning.tile,
        DTYPE=tl.float16 if half else tl.float32,
        ASM=not interpreted(),
    )
    # For single queries `merge` takes few warps and registers, so that it starts while contexts are still being read.
    crowded = queries == 1 and items > _multiprocessors(device)
    merge_launch = PreparedLaunch(
        merge,
        (items, 1, 1),
        device,
        Options(1 if crowded else 2 if queries == 1 else tuning.merge_warps, launch_pdl=overlap),
        **both,
        **({} if has_residuals else {"value_residual_ptr": None}),
        **key_strides,
        **value_strides,
        stride_part=value_size,
        num_slots=slots[1],
        has_new_mask=int(masked[0]),
        has_protected_mask=int(masked[1]),
        protected_by_row=int(named is not None and contexts > batch_size),
        SIZE=max(MMA_ROWS, next_power_of_two(head_dim)),
        VALUE_SIZE=maps[1][1],
        CROWDED=crowded,
    )
    # Each begins at a multiple of 16 bytes.
    count = -(-count // 4) * 4
    return AttentionPlan(context_launch, merge_launch, (count * value_size, count, count), count * (value_size + 2))


def queries_at_once(most: int) -> tuple[int, int]:
    """Queries of a tile, and rows of an operand, for contexts that `most` queries read."""
    operand_rows = 8 if most <= 8 else MMA_ROWS
    # A single query, or as many as an operand holds: other numbers would be kernels of their own.
    return 1 if most == 1 else operand_rows, operand_rows


@functools.cache
def _specs(numbers: tuple[int, ...]) -> tuple[SlabSpec, ...]:
    """Slab specs from their numbers, one after the other; custom ops take nothing but integers."""
    length = len(SlabSpec._fields)
    specs = (SlabSpec._make(numbers[start : start + length]) for start in range(0, len(numbers), length))
    return tuple(spec._replace(table=bool(spec.table)) for spec in specs)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _MULTIPROCESSORS


def _concurrent_programs(device: torch.device, warps: int, registers: int) -> int:
    """Number of programs that a device runs at the same time, given their warps and the registers of a thread."""
    return _multiprocessors(device) * 4 * (_PARTITION_REGISTERS // (32 * registers)) // warps
