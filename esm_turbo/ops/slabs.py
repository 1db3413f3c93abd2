"""The layout of a slab as kernels are compiled for it. Neither torch nor triton is needed."""

from __future__ import annotations

from typing import NamedTuple

# The smallest subnormal number of half precision.
_HALF_UNIT = 2.0**-24


class SlabSpec(NamedTuple):
    """The layout of a slab, a compile-time constant of the kernels.

    Attributes:
        bits: per field.
        words: loaded per token and head, of four bytes each, or one smaller word; a power of two.
        elements: parts of the words that lanes unpack, per token and head: one word each, or equal fractions of one.
        element_bits: per element.
        size: of the operand in components, padded with zeros; a power of two, at least 16.
        table: whether fields are looked up in a table.
        stored: words per token and head in memory; the others are loaded as zeros.
    """

    bits: int
    words: int
    elements: int
    element_bits: int
    size: int
    table: bool
    stored: int

    @property
    def fields(self) -> int:
        """Fields per element."""
        return self.element_bits // self.bits

    def unit(self, half: bool) -> float:
        """The value of a field's unit in an operand, in half precision or in float32; 1 for entries of tables."""
        return _HALF_UNIT if half and not self.table else 1.0
