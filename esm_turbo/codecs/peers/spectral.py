"""Spectral coefficients, as TriAttention of aither-kvcache stores keys: the RoPE frequency pairs of highest energy.

RoPE rotates the channels i and i + head_dim / 2 of a key together, at one frequency. Of each key the F pairs of largest
energy are stored: their indices (one byte each), their two coefficients as symmetric integers of `bits` bits, and one
scale in bfloat16; the other pairs are read as zero. Energy does not depend on the position, so that the pairs are the
same before RoPE, and scores computed from coefficients after RoPE are the trigonometric series of the original. F is 12
of 64 pairs as published, and for other head sizes the same fraction in steps of 4. Nothing is published about values:
here they are integers of `bits` bits with one scale per token and head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.peers.data_free import DataFreeCodec
from esm_turbo.codecs.peers.integer import pack_symmetric, unpack_symmetric

_KEPT_FRACTION = 12 / 64
_STEP = 4


class SpectralCodec(DataFreeCodec):
    """The frequency pairs of highest energy of every key."""

    allowed_bits = (3, 4, 5, 6, 7)

    @property
    def num_pairs(self) -> int:
        """F, the number of frequency pairs stored per key."""
        return max(_STEP, round(_KEPT_FRACTION * self.geometry.head_dim / 2 / _STEP) * _STEP)

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        if kind == "value":
            return pack_symmetric(kind, x, self.config.bits)
        # In units of the largest component: squares of large numbers leave the range of float32.
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        first, second = x.chunk(2, dim=-1)
        energy = (first / largest).square() + (second / largest).square()
        pairs = energy.topk(self.num_pairs, dim=-1).indices
        kept = torch.cat([first.gather(-1, pairs), second.gather(-1, pairs)], dim=-1)
        return {"key_pairs": pairs.to(torch.uint8)} | pack_symmetric(kind, kept, self.config.bits)

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        numbers = unpack_symmetric(kind, packed, self.config.bits)
        if kind == "value":
            return numbers
        pairs = packed["key_pairs"].long()
        keys = numbers.new_zeros(*numbers.shape[:-1], self.geometry.head_dim)
        return keys.scatter(-1, torch.cat([pairs, pairs + self.geometry.head_dim // 2], dim=-1), numbers)
