"""Integers per token, the usual first choice in practice: int8 and int4 with one scale per token and head.

Symmetric: x = scale (code - 2^(bits - 1) + 1), where scale is the largest magnitude over 2^(bits - 1) - 1, in bfloat16.
Asymmetric, used by other codecs for values: x = zero + scale code in groups of components, where scale is the group's
range over 2^bits - 1 and zero its minimum, both in float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.packing import pack_codes, unpack_codes
from esm_turbo.codecs.peers.data_free import NORM_DTYPE, DataFreeCodec, divide

VALUE_GROUP = 32
"""Components of a value that share scale and zero, if `head_dim` is a multiple of it; else all of them share."""


class Int8Codec(DataFreeCodec):
    """int8, symmetric, one scale per token and head."""

    width = 8

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        return pack_symmetric(kind, x, self.width)

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        return unpack_symmetric(kind, packed, self.width)


class Int4Codec(Int8Codec):
    """int4, symmetric, one scale per token and head."""

    width = 4


def pack_symmetric(kind: str, x: Tensor, bits: int) -> Packed:
    """Quantise vectors [..., n] to codes uint8 [..., n bits / 8] and scales bfloat16 [..., 1]."""
    limit = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(dim=-1, keepdim=True) / limit).to(NORM_DTYPE)
    codes = divide(x, scale.float()).round().clamp(-limit, limit) + limit
    return {f"{kind}_scales": scale, f"{kind}_codes": pack_codes(codes.to(torch.uint8), bits)}


def unpack_symmetric(kind: str, packed: Packed, bits: int) -> Tensor:
    """Undo `pack_symmetric`, float32 [..., n]."""
    limit = int(2 ** (bits - 1) - 1)
    return (unpack_codes(packed[f"{kind}_codes"], bits).float() - limit) * packed[f"{kind}_scales"].float()


def to_float16(x: Tensor) -> Tensor:
    """x in float16, clipped to its range."""
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).to(torch.float16)


def range_of(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, float16, for numbers from `low` to `high`, clipped to the range of float16."""
    zero = to_float16(low)
    return to_float16(((high - zero.float()) / (2**bits - 1)).clamp_min(0)), zero


def codes_in_range(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes uint8 of x, for scales and zeros broadcastable to it."""
    return divide(x - zero.float(), scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)


def pack_asymmetric(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise vectors [..., n] to codes uint8 [..., n bits / 8] and scales, then zeros, float16 [..., 2 groups]."""
    groups = in_groups(x, x.shape[-1] if x.shape[-1] % VALUE_GROUP else VALUE_GROUP)
    scale, zero = range_of(groups.amin(-1), groups.amax(-1), bits)
    codes = codes_in_range(groups, scale[..., None], zero[..., None], bits)
    return pack_codes(codes.flatten(-2), bits), torch.cat([scale, zero], dim=-1)


def unpack_asymmetric(packed: Tensor, ranges: Tensor, bits: int) -> Tensor:
    """Undo `pack_asymmetric`, float32 [..., n]."""
    scale, zero = ranges.float().chunk(2, dim=-1)
    codes = unpack_codes(packed, bits).float()
    groups = in_groups(codes, codes.shape[-1] // scale.shape[-1])
    x: Tensor = groups * scale[..., None] + zero[..., None]
    return x.flatten(-2)


def in_groups(x: Tensor, size: int) -> Tensor:
    """Reshape [..., n] to [..., n / size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
