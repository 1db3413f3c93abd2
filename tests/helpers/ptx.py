"""The PTX instructions that the kernels use, on arrays: they test the inline assembly that the interpreter leaves out.

Written from NVIDIA's PTX ISA 8.x. Any other instruction is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Addresses that were prefetched.
prefetched: set[int] = set()

# Any lane but the first: results must not depend on it.
LANE = 13


def run(asm: str, outputs: int, inputs: Sequence[Array]) -> list[Array]:
    """Runs a block of inline assembly element by element.

    Args:
        asm: the block; its operands are $0, $1, ..., outputs first.
        outputs: number of outputs.
        inputs: of 32 bits; addresses of 64.

    Returns:
        The outputs: uint32, or uint16 where a register was unpacked.
    """
    registers: dict[str, Array] = {f"${outputs + i}": _bits(x) for i, x in enumerate(inputs)}
    for statement in asm.strip(" {};").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if name == ".reg":
            continue
        if name == "prefetch.global.L2":
            prefetched.update(np.unique(registers[rest.strip("[]")]).tolist())
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        values = [_value(source, registers) for source in sources]
        result = _INSTRUCTIONS[name](*values)
        if target.startswith("{"):
            low, high = target.strip("{} ").replace(" ", "").split(",")
            registers[low], registers[high] = _half(result, 0), _half(result, 1)
        else:
            registers[target] = result
    return [registers[f"${i}"] for i in range(outputs)]


def _bits(x: Array) -> Array:
    made = np.ascontiguousarray(x)
    return made.view(np.uint64 if x.dtype.itemsize == 8 else np.uint32).reshape(x.shape)


def _half(x: Array, index: int) -> Array:
    return (x >> np.uint32(16 * index)).astype(np.uint16)


def _value(source: str, registers: dict[str, Array]) -> Array:
    if source == "%laneid":
        return np.uint32(LANE)  # type: ignore[return-value]
    return registers[source] if source in registers else np.uint32(int(source, 0))  # type: ignore[return-value]


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.uint32(0)
    for i in range(4):
        digit = selector >> np.uint32(4 * i) & np.uint32(0xF)
        byte = (both >> (np.uint64(8) * (digit & np.uint32(7)).astype(np.uint64)) & np.uint64(0xFF)).astype(np.uint32)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result = result | np.where(digit & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result.astype(np.uint32)  # type: ignore[no-any-return]


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    result = np.uint32(0)
    for i in range(8):
        if int(table) >> i & 1:
            parts = [x if i >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result = result | parts[0] & parts[1] & parts[2]
    return result  # type: ignore[return-value]


def _f16x2(function: Callable[..., Array]) -> Callable[..., Array]:
    """An instruction on two half-precision numbers: computed in double precision and rounded once."""

    def run(*operands: Array) -> Array:
        halves = []
        for i in range(2):
            numbers = [_half(np.asarray(x), i).view(np.float16).astype(np.float64) for x in operands]
            halves.append(function(*numbers).astype(np.float16).view(np.uint16).astype(np.uint32))
        return halves[0] | halves[1] << np.uint32(16)  # type: ignore[no-any-return]

    return run


def _bfind(x: Array) -> Array:
    return np.floor(np.log2(x.astype(np.float64))).astype(np.uint32)


def _ex2(x: Array) -> Array:
    with np.errstate(under="ignore", over="ignore"):
        power = np.exp2(np.asarray(x).view(np.float32))
    return np.where(np.abs(power) < np.finfo(np.float32).tiny, np.float32(0), power).view(np.uint32)  # type: ignore[no-any-return]


_INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "sub.f16x2": _f16x2(lambda a, b: a - b),
    "mul.rn.f16x2": _f16x2(lambda a, b: a * b),
    "fma.rn.f16x2": _f16x2(lambda a, b, c: a * b + c),
    "neg.f16x2": _f16x2(lambda a: -a),
    "mov.b32": lambda x: x,
    "mov.u32": lambda x: x,
    "or.b32": lambda a, b: a | b,
    "sub.u32": lambda a, b: a - b,
    "bfind.u32": _bfind,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "cvt.u64.u32": lambda a: np.asarray(a).astype(np.uint64),
    "add.s64": lambda a, b: a + b,
    "ex2.approx.ftz.f32": _ex2,
}
