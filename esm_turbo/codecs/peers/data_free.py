"""Codecs that need no calibration: their common base, random rotations, and vectors as direction and norm."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from esm_turbo.codecs.base import KVCodec
from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.codecs.fitting.transforms import random_hadamard
from esm_turbo.codecs.packing import check_head_dim
from esm_turbo.config import Geometry, TurboConfig

NORM_DTYPE = torch.bfloat16
"""Two bytes, with the range of float32; published methods count two or four."""


class DataFreeCodec(KVCodec):
    """Codec whose state follows from the options and the model's geometry alone.

    Attributes:
        allowed_bits: values of the option `bits`; empty if the codec ignores it.
    """

    allowed_bits: tuple[int, ...] = ()

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        """The state of one layer; all layers are alike."""
        return {}

    @classmethod
    def state_for(cls, config: TurboConfig, geometry: Geometry) -> dict[str, Tensor]:
        """The state, see `KVCodec`.

        Raises:
            ValueError: the codec does not support these `bits` or this `head_dim`.
        """
        check_options(config, geometry, cls.allowed_bits)
        return every_layer(geometry, cls.arrays(config, geometry))

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """See `KVCodec.fit`; only the geometry of the statistics is used."""
        return cls.state_for(config, statistics.geometry)


def check_options(config: TurboConfig, geometry: Geometry, allowed_bits: tuple[int, ...]) -> None:
    """Check that a codec supports `bits` and that codes can be packed.

    Raises:
        ValueError: `allowed_bits` is neither empty nor holds `config.bits`, or `head_dim` is not a multiple of 8.
    """
    if allowed_bits and config.bits not in allowed_bits:
        raise ValueError(f"`bits` of codec {config.codec!r} must be one of {list(allowed_bits)}, got {config.bits}")
    check_head_dim(geometry.head_dim)


def every_layer(geometry: Geometry, arrays: Mapping[str, ArrayLike]) -> dict[str, Tensor]:
    """The same float32 tensors repeated for every layer, [layers, ...] each."""
    tensors = {name: torch.from_numpy(np.array(array, dtype=np.float32)) for name, array in arrays.items()}
    return {name: t[None].repeat(geometry.num_layers, *[1] * t.dim()) for name, t in tensors.items()}


def random_rotation(config: TurboConfig, geometry: Geometry) -> dict[str, ArrayLike]:
    """Maps of keys and values: one randomised Hadamard rotation for all heads."""
    forward, inverse = (matrix[None] for matrix in random_hadamard(geometry.head_dim, config.seed))
    return {"key_map": forward, "key_inverse": inverse, "value_map": forward, "value_inverse": inverse}


def split_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split vectors into direction and norm.

    Args:
        x: vectors [..., n].

    Returns:
        Unit vectors (zero for zero) float32 [..., n], and norms bfloat16 [..., 1].
    """
    # Divided by the largest component first: squares of very large or small numbers leave the range of float32.
    largest = x.abs().amax(dim=-1, keepdim=True)
    scaled = divide(x, largest)
    norm = scaled.square().sum(dim=-1, keepdim=True).sqrt()
    length = (norm * largest).clamp_max(torch.finfo(NORM_DTYPE).max)
    return divide(scaled, norm), length.to(NORM_DTYPE)


def divide(x: Tensor, divisor: Tensor) -> Tensor:
    """x / divisor, and zero where the divisor is too small for its reciprocal to be a float32."""
    usable = divisor >= torch.finfo(torch.float32).tiny
    return torch.where(usable, x / torch.where(usable, divisor, 1.0), 0.0)
