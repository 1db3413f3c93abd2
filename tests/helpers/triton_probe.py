"""Kernels that show what the attention kernels make of packed words. Imports triton: import it within tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from esm_turbo.ops.kernels.operands import (
    ask_for,
    key_operand,
    load_key_slab,
    load_value_slab,
    packed_table,
    token_at,
    value_operand,
)
from esm_turbo.ops.triton_layout import SlabView


@triton.jit
def _show_keys(
    slab_ptr,
    table_ptr,
    out_ptr,
    num_tokens,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
    SLABS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    elements = load_key_slab(slab_ptr, 0, 0, num_tokens, tl.minimum(num_tokens, 1), T, SHORT, SLABS, 0)
    table = packed_table(table_ptr, SLABS, DTYPE, ASM)
    operand = key_operand(elements, table_ptr, table, T, ROWS, SLABS, 0, DTYPE, ASM)
    size: tl.constexpr = SLABS[0][4]
    token = tl.arange(0, T)
    tl.store(out_ptr + token[None, :] * size + tl.arange(0, size)[:, None], operand.to(tl.float32))


@triton.jit
def _show_values(
    slab_ptr,
    table_ptr,
    out_ptr,
    num_tokens,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
    SLABS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    words = load_value_slab(slab_ptr, 0, 0, num_tokens, T, SHORT, SLABS, 0)
    table = packed_table(table_ptr, SLABS, DTYPE, ASM)
    operand = value_operand(words, table_ptr, table, T, SLABS, 0, DTYPE, ASM)
    size: tl.constexpr = SLABS[0][4]
    token = token_at(tl.arange(0, T))
    tl.store(out_ptr + token[:, None] * size + tl.arange(0, size)[None, :], operand.to(tl.float32))


@triton.jit
def _ask(slab_ptr, first, last, COUNT: tl.constexpr, SLABS: tl.constexpr):
    ask_for((slab_ptr,), 0, first, last, COUNT, SLABS, True)


def ask(view: SlabView, words: Tensor, first: int, last: int, count: int) -> None:
    """Asks for `count` columns of a slab from `first` on, up to `last`."""
    _ask[(1,)](words, first, last, COUNT=count, SLABS=(view.spec,), num_warps=1)


def operand(
    kind: str,
    view: SlabView,
    words: Tensor,
    table: Tensor | None,
    dtype: torch.dtype,
    rows: int = 8,
    assembly: bool | None = None,
) -> Tensor:
    """The operand of 64 tokens, float32 [64, size].

    Args:
        kind: `key` or `value`.
        view: of the slab.
        words: of the tokens, at most 64, [tokens, words].
        table: [16] of a slab whose fields are looked up, in the operand's dtype.
        dtype: of the operand, float16 or float32.
        rows: of the operand that it is multiplied with, 8 or 16.
        assembly: whether it is made with inline assembly; None for where there is a GPU.
    """
    show = _show_keys if kind == "key" else _show_values
    out = torch.full((64, view.size), float("nan"), device=words.device)
    show[(1,)](
        words,
        out if table is None else table,
        out,
        len(words),
        T=64,
        ROWS=rows,
        SHORT=len(words) < 64,
        SLABS=(view.spec,),
        DTYPE=tl.float16 if dtype == torch.float16 else tl.float32,
        ASM=words.is_cuda if assembly is None else assembly,
        num_warps=1,
    )
    return out
