"""Matrix products with few rows. Imported only where kernels run."""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of a tensor core's first operand.
MMA_ROWS: tl.constexpr = tl.constexpr(16)


@triton.jit
def as_lhs(x):
    """x [rows, k] as the left operand of `dot_fields`: transposed if it has only 8 rows.

    The first operand of a tensor core has at least 16 rows, the second at least 8 columns. Products of 8 rows are
    therefore computed as y^T x^T.
    """
    if x.shape[0] < MMA_ROWS:
        return tl.trans(x)
    else:
        return x


@triton.jit
def _dot_lhs(lhs, y, acc, PRECISION: tl.constexpr):
    """acc + x y, [rows, n], where lhs is `as_lhs(x)`."""
    if acc.shape[0] < MMA_ROWS:
        return tl.trans(tl.dot(tl.trans(y), lhs, tl.trans(acc), input_precision=PRECISION))
    else:
        return tl.dot(lhs, y, acc, input_precision=PRECISION)


@triton.jit
def dot(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y, [rows, n]."""
    return _dot_lhs(as_lhs(x), y, acc, PRECISION)


@triton.jit
def dot_fields(lhs, fields, acc, TABLE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x fields, [rows, n], where lhs is `as_lhs(x)`.

    TF32 represents a field exactly unless it comes from a table. Two products, one for each half of the bits of x, are
    then as accurate as the three that two float32 factors need.
    """
    if lhs.dtype == tl.float32 and not TABLE:
        high = (lhs.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        return _dot_lhs(high, fields, _dot_lhs(lhs - high, fields, acc, "tf32"), "tf32")
    else:
        return _dot_lhs(lhs, fields, acc, PRECISION)


@triton.jit
def slab_zeros(SLAB: tl.constexpr, ROWS: tl.constexpr):
    """An accumulator of products with a slab's operand, float32 [ROWS, size]."""
    size: tl.constexpr = SLAB.size
    return tl.zeros((ROWS, size), tl.float32)


@triton.jit
def pairs_to_quads(x):
    """Permutes the columns of every 16 so that the lanes that computed x are those that multiply it next.

    A product leaves a lane two neighbouring columns of each 8. An operand unpacked from bytes takes four neighbouring
    columns of 16 from a lane. The permutation renames registers and moves no data.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, (rows, columns // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(pairs, (rows, columns))
