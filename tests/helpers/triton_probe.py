"""Kernels that expose the operands that the attention kernels unpack. Imports triton: import it within tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from esm_turbo.ops.kernels.operands import (
    key_operand,
    load_key_slab,
    load_packed_table,
    load_value_slab,
    slab_of,
    token_at,
    value_operand,
)
from esm_turbo.ops.slabs import SlabSpec


@triton.jit
def _show_operand(
    slab_ptr,
    table_ptr,
    out_ptr,
    num_tokens,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    SLABS: tl.constexpr,
    KEYS: tl.constexpr,
    SPREAD: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Writes the operand of keys, or of values, in the order of tokens, [T, size]. Grid: (1,)."""
    size: tl.constexpr = slab_of(SLABS, 0).size
    index = tl.arange(0, size)
    table = load_packed_table(table_ptr, slab_of(SLABS, 0), DTYPE, ASM)
    if KEYS:
        opaque_one = tl.minimum(num_tokens, 1)
        elements = load_key_slab(slab_ptr, 0, 0, opaque_one, T, slab_of(SLABS, 0), SPREAD)
        operand = key_operand(elements, table_ptr, table, T, ROWS, slab_of(SLABS, 0), SPREAD, DTYPE, ASM)  # [size, T]
        tl.store(out_ptr + tl.arange(0, T)[None, :] * size + index[:, None], operand.to(tl.float32))
    else:
        words = load_value_slab(slab_ptr, 0, 0, T, slab_of(SLABS, 0))
        operand = value_operand(words, table_ptr, table, T, slab_of(SLABS, 0), DTYPE, ASM)  # [T, size]
        tl.store(out_ptr + token_at(tl.arange(0, T))[:, None] * size + index[None, :], operand.to(tl.float32))


def operand(
    kind: str,
    spec: SlabSpec,
    words: Tensor,
    table: Tensor | None,
    dtype: torch.dtype,
    rows: int = 8,
    assembly: bool | None = None,
    spread: bool = False,
) -> Tensor:
    """The operand of 64 tokens, float32 [64, size].

    Args:
        kind: `key` or `value`.
        spec: of the slab.
        words: of the tokens, at most 64, [tokens, words].
        table: [16] of a slab whose fields are looked up, in the operand's dtype.
        dtype: of the operand, float16 or float32.
        rows: of the operand that it is multiplied with, 8 or 16.
        assembly: whether it is made with inline assembly; None for where there is a GPU.
        spread: whether the words of keys go through shared memory.
    """
    out = torch.full((64, spec.size), float("nan"), device=words.device)
    # There is always room for a whole tile.
    words = torch.nn.functional.pad(words, (0, 0, 0, 64 - len(words)))
    _show_operand[(1,)](
        slab_ptr=words,
        table_ptr=out if table is None else table,
        out_ptr=out,
        num_tokens=len(words),
        T=64,
        ROWS=rows,
        SLABS=(spec,),
        KEYS=kind == "key",
        SPREAD=spread,
        DTYPE=tl.float16 if dtype == torch.float16 else tl.float32,
        ASM=words.is_cuda if assembly is None else assembly,
        num_warps=1,
    )
    return out
