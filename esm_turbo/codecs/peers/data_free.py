"""What codecs have in common that need no calibration, and how they store the length of a vector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from esm_turbo.codecs.base import KVCodec
from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.codecs.fitting.transforms import random_hadamard
from esm_turbo.codecs.packing import GROUP_SIZE
from esm_turbo.config import Geometry, TurboConfig

NORM_DTYPE = torch.bfloat16
"""Two bytes as in the published methods that count them so, and the range of float32."""


class DataFreeCodec(KVCodec):
    """A codec whose state follows from the options and the model's geometry alone."""

    @classmethod
    @abstractmethod
    def state_for(cls, config: TurboConfig, geometry: Geometry) -> dict[str, Tensor]:
        """The state, see `KVCodec`.

        Raises:
            ValueError: the codec has no such `bits`, or cannot have this `head_dim`.
        """

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """See `KVCodec.fit`; of the statistics only the geometry is looked at."""
        return cls.state_for(config, statistics.geometry)


def check_options(config: TurboConfig, geometry: Geometry, bits: tuple[int, ...]) -> None:
    """Makes sure that `bits` is one of those that a codec has, and that codes can be packed.

    Raises:
        ValueError: one is not so.
    """
    if config.bits not in bits:
        raise ValueError(f"`bits` of codec {config.codec!r} must be one of {list(bits)}, got {config.bits}")
    check_head_dim(geometry)


def check_head_dim(geometry: Geometry) -> None:
    """Makes sure that the codes of a vector fill whole bytes.

    Raises:
        ValueError: they do not.
    """
    if geometry.head_dim % GROUP_SIZE:
        raise ValueError(
            f"codes are packed by {GROUP_SIZE}: `head_dim` must be a multiple of {GROUP_SIZE}, got {geometry.head_dim}"
        )


def every_layer(geometry: Geometry, arrays: Mapping[str, ArrayLike]) -> dict[str, Tensor]:
    """The same float32 tensors for every layer, [layers, ...] each."""
    tensors = {name: torch.from_numpy(np.array(array, dtype=np.float32)) for name, array in arrays.items()}
    return {name: t[None].repeat(geometry.num_layers, *[1] * t.dim()) for name, t in tensors.items()}


def random_rotation(config: TurboConfig, geometry: Geometry) -> dict[str, ArrayLike]:
    """A randomised Hadamard rotation, one for all heads, as the map of keys and values."""
    forward, inverse = (matrix[None] for matrix in random_hadamard(geometry.head_dim, config.seed))
    return {"key_map": forward, "key_inverse": inverse, "value_map": forward, "value_inverse": inverse}


def split_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """A vector as direction and length.

    Args:
        x: [..., n].

    Returns:
        Unit vectors (zero for zero) float32 [..., n], and norms bfloat16 [..., 1].
    """
    # By the largest component first: squares of large or small numbers leave float32.
    largest = x.abs().amax(dim=-1, keepdim=True)
    scaled = divide(x, largest)
    norm = scaled.square().sum(dim=-1, keepdim=True).sqrt()
    length = (norm * largest).clamp_max(torch.finfo(NORM_DTYPE).max)
    return divide(scaled, norm), length.to(NORM_DTYPE)


def divide(x: Tensor, divisor: Tensor) -> Tensor:
    """x / divisor, and zero where the divisor is so small that its reciprocal leaves float32."""
    usable = divisor >= torch.finfo(torch.float32).tiny
    return torch.where(usable, x / torch.where(usable, divisor, 1.0), 0.0)
