"""Products of few rows with operands. Imported only where kernels run."""

from __future__ import annotations

import triton
import triton.language as tl

# The fewest rows of an operand.
OPERAND: tl.constexpr = tl.constexpr(16)


@triton.jit
def oriented(x):
    """Rows as `product` takes them: eight are multiplied as columns, since an operand has no fewer than 16 rows."""
    if x.shape[0] < OPERAND:
        return tl.trans(x)
    else:
        return x


@triton.jit
def _oriented_dot(x, y, total, PRECISION: tl.constexpr):
    """total + x y, [rows, n], of `oriented` rows."""
    if total.shape[0] < OPERAND:
        return tl.trans(tl.dot(tl.trans(y), x, tl.trans(total), input_precision=PRECISION))
    else:
        return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def dot(x, y, total, PRECISION: tl.constexpr):
    """total + x y, [rows, n]."""
    return _oriented_dot(oriented(x), y, total, PRECISION)


@triton.jit
def product(x, fields, total, TABLE: tl.constexpr, PRECISION: tl.constexpr):
    """total + x fields, of `oriented` rows.

    TF32 holds a field exactly, unless it was looked up: two products, with either half of x's bits, are as good as the
    three of float32 factors.
    """
    if x.dtype == tl.float32 and not TABLE:
        high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        return _oriented_dot(high, fields, _oriented_dot(x - high, fields, total, "tf32"), "tf32")
    else:
        return _oriented_dot(x, fields, total, PRECISION)


@triton.jit
def zeros_of(SLABS: tl.constexpr, SLAB: tl.constexpr, ROWS: tl.constexpr):
    size: tl.constexpr = SLABS[SLAB][4]
    return tl.zeros((ROWS, size), tl.float32)


@triton.jit
def in_fours(x):
    """Brings neighbours of eight columns, two by two as a product leaves them, to the lanes that multiply them next.

    A lane holds pairs of two neighbouring eights, and of an operand made of bytes four columns in a row.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, (rows, columns // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(pairs, (rows, columns))
