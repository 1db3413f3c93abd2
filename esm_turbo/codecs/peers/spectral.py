"""Spectral coefficients, as TriAttention of aither-kvcache stores keys: the RoPE frequency pairs of highest energy.

RoPE rotates the channels i and i + head_dim / 2 of a key together, at one frequency. Of each key the F pairs of largest
energy are stored: their indices (one byte each), their two coefficients as symmetric integers, and one scale in
bfloat16; the other pairs are read as zero. Energy does not depend on the position, so that the pairs are the same
before RoPE, and scores computed from coefficients after RoPE are the trigonometric series of the original. Its package
encodes values likewise; here they are integers of as many bits with one scale per token and head.

| codec | F of 64 pairs; of fewer the same fraction, rounded to fours: both 8 of 32 | bits of a coefficient |
| --- | --- | --- |
| `SpectralCodec` | 12, as published | the option `bits` |
| `Spectral8Codec` | 16, as published with eight bits | 8 |
| `SpectralLayersCodec` | the fewest that hold 95 % of the energy of a layer's calibration keys | the option `bits` |

95 % is what its authors state of twelve pairs in a typical layer. Their own numbers of pairs by layer belong to single
language models.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.base import KVCodec, Packed
from esm_turbo.codecs.fitting.statistics import Array, KVStatistics
from esm_turbo.codecs.peers.data_free import DataFreeCodec, check_options
from esm_turbo.codecs.peers.integer import pack_symmetric, unpack_symmetric
from esm_turbo.config import TurboConfig

_ALLOWED_BITS = (3, 4, 5, 6, 7)
_STEP = 4
_SHARE = 0.95


class _SpectralPairs(KVCodec):
    """The pairs of highest energy of every key; how many, says a subclass."""

    @property
    def width(self) -> int:
        """Bits of a coefficient."""
        return self.config.bits

    def num_pairs(self, layer_idx: int) -> int:
        """F, the number of frequency pairs stored per key."""
        raise NotImplementedError

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        if kind == "value":
            return pack_symmetric(kind, x, self.width)
        # In units of the largest component: squares of large numbers leave the range of float32.
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        first, second = x.chunk(2, dim=-1)
        energy = (first / largest).square() + (second / largest).square()
        pairs = energy.topk(self.num_pairs(layer_idx), dim=-1).indices
        kept = torch.cat([first.gather(-1, pairs), second.gather(-1, pairs)], dim=-1)
        return {"key_pairs": pairs.to(torch.uint8)} | pack_symmetric(kind, kept, self.width)

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        numbers = unpack_symmetric(kind, packed, self.width)
        if kind == "value":
            return numbers
        pairs = packed["key_pairs"].long()
        keys = numbers.new_zeros(*numbers.shape[:-1], self.geometry.head_dim)
        return keys.scatter(-1, torch.cat([pairs, pairs + self.geometry.head_dim // 2], dim=-1), numbers)


class SpectralCodec(_SpectralPairs, DataFreeCodec):
    """The same number of pairs in all layers."""

    allowed_bits: tuple[int, ...] = _ALLOWED_BITS
    kept_fraction = 12 / 64

    def num_pairs(self, layer_idx: int) -> int:
        return max(_STEP, round(self.kept_fraction * self.geometry.head_dim / 2 / _STEP) * _STEP)


class Spectral8Codec(SpectralCodec):
    """More pairs, with coefficients of eight bits."""

    allowed_bits = ()
    kept_fraction = 16 / 64

    @property
    def width(self) -> int:
        return 8


class SpectralLayersCodec(_SpectralPairs):
    """As many pairs in each layer as hold 95 % of the energy."""

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        check_options(config, statistics.geometry, _ALLOWED_BITS)
        _, sample = statistics.select(config.protect_special_tokens)
        pairs = statistics.geometry.head_dim // 2
        held = np.stack([retained_energy(keys).mean(axis=tuple(range(keys.ndim - 1))) for keys in sample.keys])
        # The last share is one, but for rounding.
        fewest = np.where(held >= _SHARE, np.arange(1, pairs + 1), pairs).min(axis=-1)
        kept = np.minimum(-(-fewest // _STEP) * _STEP, pairs)
        return {"key_pairs_kept": torch.from_numpy(kept[:, None]).float()}

    def num_pairs(self, layer_idx: int) -> int:
        return int(self.state["key_pairs_kept"][layer_idx])


def retained_energy(keys: Array) -> Array:
    """Share of the energy of every key [..., D] in its 1, 2, ... D / 2 pairs of largest energy, [..., D / 2]."""
    first, second = np.split(np.asarray(keys, np.float64), 2, axis=-1)
    held = np.sort(first**2 + second**2, axis=-1)[..., ::-1].cumsum(axis=-1)
    share: Array = held / np.maximum(held[..., -1:], np.finfo(np.float64).tiny)
    return share
