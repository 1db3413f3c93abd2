"""Integers per token, what is picked first in practice: int8 and int4 with one scale for a head's key or value.

Symmetric: x = scale (code - 2^(bits - 1) + 1), the scale in bfloat16 the largest magnitude over 2^(bits - 1) - 1.
Asymmetric, for the codecs that put it on values: x = zero + scale code in groups of components, scale and zero (the
group's range over 2^bits - 1, and its minimum) in float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.packing import pack_codes, unpack_codes
from esm_turbo.codecs.peers.data_free import NORM_DTYPE, DataFreeCodec, check_head_dim, divide
from esm_turbo.config import Geometry, TurboConfig

VALUE_GROUP = 32
"""Components of a value that share scale and zero, where the head size is a multiple of it."""


class Int8Codec(DataFreeCodec):
    """int8, symmetric, one scale a token and head."""

    width = 8

    @classmethod
    def state_for(cls, config: TurboConfig, geometry: Geometry) -> dict[str, Tensor]:
        check_head_dim(geometry)
        return {}

    def quantize(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        packed: Packed = {}
        for kind, x in (("key", keys), ("value", values)):
            codes, packed[f"{kind}_scales"] = quantize_symmetric(x, self.width)
            packed[f"{kind}_codes"] = pack_codes(codes, self.width)
        return packed

    def dequantize_keys(self, layer_idx: int, packed: Packed) -> Tensor:
        return dequantize_symmetric(unpack_codes(packed["key_codes"], self.width), packed["key_scales"], self.width)

    def dequantize_values(self, layer_idx: int, packed: Packed) -> Tensor:
        codes = unpack_codes(packed["value_codes"], self.width)
        return dequantize_symmetric(codes, packed["value_scales"], self.width)


class Int4Codec(Int8Codec):
    """int4, symmetric, one scale a token and head."""

    width = 4


def quantize_symmetric(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 and scales bfloat16 [..., 1] of vectors [..., n]."""
    limit = _limit(bits)
    scale = (x.abs().amax(dim=-1, keepdim=True) / limit).to(NORM_DTYPE)
    codes = divide(x, scale.float()).round().clamp(-limit, limit) + limit
    return codes.to(torch.uint8), scale


def dequantize_symmetric(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Inverse of `quantize_symmetric`, float32."""
    return (codes.float() - _limit(bits)) * scale.float()


def range_of(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, float16, for numbers from `low` to `high`; what float16 cannot hold is cut off."""
    most = torch.finfo(torch.float16).max
    zero = low.clamp(-most, most).to(torch.float16)
    scale = ((high - zero.float()) / (2**bits - 1)).clamp(0, most).to(torch.float16)
    return scale, zero


def codes_in_range(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes uint8 of x for a scale and zero that broadcast to it."""
    return divide(x - zero.float(), scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)


def pack_asymmetric(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Vectors [..., n] as packed codes uint8 [..., n bits / 8] and float16 [..., 2 groups], scales then zeros."""
    groups = in_groups(x, x.shape[-1] if x.shape[-1] % VALUE_GROUP else VALUE_GROUP)
    scale, zero = range_of(groups.amin(-1), groups.amax(-1), bits)
    codes = codes_in_range(groups, scale[..., None], zero[..., None], bits)
    return pack_codes(codes.flatten(-2), bits), torch.cat([scale, zero], dim=-1)


def unpack_asymmetric(packed: Tensor, ranges: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_asymmetric`, float32."""
    scale, zero = ranges.float().chunk(2, dim=-1)
    codes = unpack_codes(packed, bits).float()
    groups = in_groups(codes, codes.shape[-1] // scale.shape[-1])
    x: Tensor = groups * scale[..., None] + zero[..., None]
    return x.flatten(-2)


def in_groups(x: Tensor, size: int) -> Tensor:
    """[..., n] as [..., n / size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _limit(bits: int) -> int:
    """The largest of symmetric integers."""
    return (1 << bits - 1) - 1
