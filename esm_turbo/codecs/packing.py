"""The bit format of packed codes, and the rule that turns a number into a code.

A *code* is an unsigned integer of `bits` bits (1 to 8). Eight codes form a *group*, which fills exactly `bits` bytes.
Code j of a group occupies the bits [bits * j, bits * (j + 1)) of one little-endian bit string, whose bit n is bit n % 8
(0 is the least significant) of byte n // 8. Groups follow each other without gaps: there is no padding, and every code
takes `bits` bits.

| bits | bytes per group | smallest unit | equivalent layout |
| --- | --- | --- | --- |
| 1 | 1 | 8 codes, 1 byte | bit j of the byte is code j |
| 2 | 2 | 4 codes, 1 byte | four fields per byte, the lowest first |
| 3 | 3 | 8 codes, 3 bytes | one 24-bit little-endian word |
| 4 | 4 | 2 codes, 1 byte | low nibble first; one 32-bit word per group |
| 5 | 5 | 8 codes, 5 bytes | one 40-bit little-endian word |
| 6 | 6 | 4 codes, 3 bytes | two 24-bit little-endian words |
| 7 | 7 | 8 codes, 7 bytes | one 56-bit little-endian word |
| 8 | 8 | 1 code, 1 byte | the codes themselves |

Three bits, codes a to h, most significant bit of each byte on the left (a0 is the lowest bit of a):

      byte 2          byte 1          byte 0
    h2h1h0g2g1g0f2f1|f0e2e1e0d2d1d0c2|c1c0b2b1b0a2a1a0

Four bits, as one 32-bit word:

    hhhhgggg|ffffeeee|ddddcccc|bbbbaaaa

A 3-bit table index with a sign on top, `index | sign << 3`, is an ordinary 4-bit code.

Packing and unpacking move fields inside machine words, two codes, then four, then eight at a time: a few vectorised
integer operations on every device. Words are reinterpreted bytes, so that only little-endian hosts are supported.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

__all__ = ["GROUP_SIZE", "MAX_BITS", "check_head_dim", "midpoints", "pack_codes", "quantize", "unpack_codes"]

GROUP_SIZE = 8
MAX_BITS = 8

# From five bits on, binary search is faster than comparing with every boundary.
_SEARCH_FROM_BOUNDARIES = 31
_WORD_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError unless the codes of a vector fill whole groups."""
    if head_dim % GROUP_SIZE:
        raise ValueError(
            f"codes are packed in groups of {GROUP_SIZE}: `head_dim` must be a multiple of {GROUP_SIZE}, got {head_dim}"
        )


def check_codes(codes: Tensor, bits: int) -> None:
    """Raise ValueError unless `codes` is an integer tensor [..., 8 * groups] and `bits` is 1 to 8."""
    check_bits(bits)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"`codes` must be an integer tensor, got {codes.dtype}")
    if codes.ndim == 0 or codes.shape[-1] % GROUP_SIZE:
        raise ValueError(f"`codes` must be [..., a multiple of {GROUP_SIZE}], got shape {tuple(codes.shape)}")


def check_packed(packed: Tensor, bits: int) -> None:
    """Raise ValueError unless `packed` is a uint8 tensor [..., bits * groups] and `bits` is 1 to 8."""
    check_bits(bits)
    if packed.dtype != torch.uint8:
        raise ValueError(f"`packed` must be uint8, got {packed.dtype}")
    if packed.ndim == 0 or packed.shape[-1] % bits:
        raise ValueError(f"`packed` must be [..., a multiple of `bits` = {bits}], got shape {tuple(packed.shape)}")


def check_bits(bits: int) -> None:
    """Raise ValueError unless `bits` is 1 to 8."""
    if bits not in range(1, MAX_BITS + 1):
        raise ValueError(f"`bits` must be one of 1 to {MAX_BITS}, got {bits}")


def check_boundaries(x: Tensor, boundaries: Tensor) -> None:
    """Raise ValueError unless `quantize` accepts `x` and `boundaries`."""
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"`x` must be floating point [..., head_dim], got {x.dtype} of shape {tuple(x.shape)}")
    if boundaries.ndim not in (1, 2, 3):
        raise ValueError(
            "`boundaries` must be [levels - 1], [heads, levels - 1] or [heads, head_dim, levels - 1], "
            f"got shape {tuple(boundaries.shape)}"
        )
    if boundaries.shape[-1] >= 2**MAX_BITS:
        raise ValueError(f"a code has at most {2**MAX_BITS} levels, got {boundaries.shape[-1] + 1}")
    if boundaries.ndim == 1:
        return
    if x.ndim < 3 or boundaries.shape[0] not in (1, x.shape[-3]):
        raise ValueError(
            f"`boundaries` of {boundaries.shape[0]} heads do not fit `x` of shape {tuple(x.shape)}: "
            "[..., heads, length, head_dim] is expected"
        )
    if boundaries.ndim == 3 and boundaries.shape[1] != x.shape[-1]:
        raise ValueError(f"`boundaries` of {boundaries.shape[1]} components do not fit `x` of shape {tuple(x.shape)}")


def _unit(bits: int) -> tuple[int, int]:
    """Number of codes and of bytes in the smallest unit of whole codes and whole bytes."""
    num_codes = GROUP_SIZE // gcd(GROUP_SIZE, bits)
    return num_codes, num_codes * bits // 8


def _lower_fields(bits: int, step: int, num_codes: int) -> int:
    """Mask of every other field of a word, from the lowest: `bits << step` bits in a slot of `8 << step`."""
    field = (1 << (bits << step)) - 1
    return sum(field << start for start in range(0, 8 * num_codes, 16 << step))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of `bits` bits without gaps, in the format of this module.

    A code outside 0 to `2**bits - 1` is reduced to its lowest `bits` bits: it cannot spill into its
    neighbours, and no check forces a device sync.

    Args:
        codes: integer tensor [..., 8 * groups], any strides.
        bits: width of a code, 1 to 8.

    Returns:
        uint8 [..., bits * groups], contiguous, on the device of `codes`; it shares no memory with
        `codes`.

    Raises:
        ValueError: `bits` outside 1 to 8, a dtype that is not an integer one, or a last dimension that is
            not a multiple of 8.
    """
    check_codes(codes, bits)
    num_codes, num_bytes = _unit(bits)
    shape = (*codes.shape[:-1], codes.shape[-1] // GROUP_SIZE * bits)
    # Flattened, because a view as words also checks the strides of dimensions of size 0 and 1.
    fields = (codes.to(torch.uint8) & ((1 << bits) - 1)).flatten()
    if num_codes == 1:
        return fields.view(shape)
    words = fields.view(_WORD_DTYPES[num_codes])
    for step in range(num_codes.bit_length() - 1):
        lower = words & _lower_fields(bits, step, num_codes)
        words ^= lower
        words >>= (8 - bits) << step
        words |= lower
    if num_bytes == 1:
        return words.to(torch.uint8).view(shape)
    return words.view(torch.uint8).view(-1, num_codes)[:, :num_bytes].contiguous().view(shape)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_codes`.

    Args:
        packed: uint8 [..., bits * groups], any strides.
        bits: width of a code, 1 to 8.

    Returns:
        uint8 [..., 8 * groups], contiguous, on the device of `packed`; it shares no memory with `packed`.

    Raises:
        ValueError: `bits` outside 1 to 8, a dtype other than uint8, or a last dimension that is not a
            multiple of `bits`.
    """
    check_packed(packed, bits)
    num_codes, num_bytes = _unit(bits)
    shape = (*packed.shape[:-1], packed.shape[-1] // bits * GROUP_SIZE)
    if num_codes == 1:
        return packed.clone(memory_format=torch.contiguous_format)
    flat = packed.reshape(-1)
    if num_bytes == 1:
        words = flat.to(_WORD_DTYPES[num_codes])
    else:
        spread = flat.new_zeros(flat.shape[0] // num_bytes, num_codes)
        spread[:, :num_bytes] = flat.view(-1, num_bytes)
        words = spread.view(-1).view(_WORD_DTYPES[num_codes])
    for step in reversed(range(num_codes.bit_length() - 1)):
        lower = words & _lower_fields(bits, step, num_codes)
        words ^= lower
        words <<= (8 - bits) << step
        words |= lower
    return words.view(torch.uint8).view(shape)


def quantize(x: Tensor, boundaries: Tensor) -> Tensor:
    """Code of each element: the number of boundaries strictly below it.

    With boundaries half way between neighbouring levels this is the nearest level. The rule for ties is the same on
    every device: an element exactly at a boundary gets the lower code. NaN and -inf get code 0, +inf gets the highest
    code. The comparison uses the wider dtype of the two arguments: a bfloat16 `x` is compared with float32 boundaries
    exactly. Keep boundaries in float32.

    Args:
        x: floating point [..., head_dim], or [..., heads, length, head_dim] if boundaries differ between heads.
        boundaries: ascending along the last dimension (not checked), [levels - 1] for all elements,
            [heads, levels - 1] per head or [heads, head_dim, levels - 1] per component; heads may be 1.

    Returns:
        uint8, the shape of `x`.

    Raises:
        ValueError: shapes that do not match, an `x` that is not floating point, or more than 256 levels.
    """
    check_boundaries(x, boundaries)
    if boundaries.ndim == 1 and boundaries.shape[0] >= _SEARCH_FROM_BOUNDARIES:
        return _search(x, boundaries)
    # Slices, because a 0-d boundary would be rounded to the dtype of a half-precision `x`.
    if boundaries.ndim == 1:
        columns = [boundaries[k : k + 1] for k in range(boundaries.shape[-1])]
    elif boundaries.ndim == 2:
        columns = [boundaries[:, k, None, None] for k in range(boundaries.shape[-1])]
    else:
        columns = [boundaries[:, None, :, k] for k in range(boundaries.shape[-1])]
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for column in columns:
        codes += x > column
    return codes


def _search(x: Tensor, boundaries: Tensor) -> Tensor:
    """`quantize` with a single table, by binary search: one step per bit of a code."""
    steps = boundaries.shape[0].bit_length()
    missing = 2**steps - 1 - boundaries.shape[0]
    padded = torch.cat([boundaries, boundaries.new_full((missing,), float("inf"))])
    flat = x.reshape(-1)
    codes = torch.zeros(flat.shape, dtype=torch.int32, device=x.device)
    for step in reversed(range(steps)):
        # The middle boundary of each code's remaining range.
        above = flat > padded[2**step - 1 :].index_select(0, codes)
        codes.add_(above, alpha=2**step)
    return codes.to(torch.uint8).view(x.shape)


def midpoints(levels: Tensor) -> Tensor:
    """Boundaries between ascending levels [..., n], [..., n - 1]."""
    return (levels[..., 1:] + levels[..., :-1]) / 2
