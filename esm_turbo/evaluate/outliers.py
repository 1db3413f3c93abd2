"""Outlier channels of a given scale, planted in a copy of a model that still computes the same function.

Scaling a RoPE pair of key channels by a and the same pair of query channels by 1/a preserves every attention score;
scaling value channels by a and the matching columns of the output projection by 1/a preserves every output. A cache of
keys and values then has channels a times larger than before.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from esm_turbo.config import Geometry

if TYPE_CHECKING:
    from esm_turbo.modeling_esm_turbo import TurboEsmForMaskedLM


def with_outliers(model: TurboEsmForMaskedLM, scale: float, seed: int = 0) -> TurboEsmForMaskedLM:
    """A copy of a model with one pair of key channels and one pair of value channels of every head scaled.

    The copy computes the same function up to the rounding of its dtype (in bfloat16, a scale that is not a power of two
    rounds the scaled weights once more).

    Args:
        model: it is not modified.
        scale: factor of the channels; 1 gives a plain copy.
        seed: of the choice of channels.

    Returns:
        The copy, without a calibration, since that of the model no longer fits.

    Raises:
        ValueError: `scale` is not a positive number.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"`scale` must be a positive number, got {scale}")
    planted = copy.deepcopy(model, {id(model.esm.calibration): None})
    geometry = Geometry.of(model.config)
    channels = torch.from_numpy(outlier_channels(geometry, seed))
    with torch.no_grad():
        for layer, (keys, values) in zip(planted.esm.encoder.layer, channels, strict=True):
            attention = layer.attention
            for projection, rows, factor in (
                (attention.self.key, keys, scale),
                (attention.self.query, keys, 1 / scale),
                (attention.self.value, values, scale),
            ):
                projection.weight[rows] *= factor
                projection.bias[rows] *= factor
            attention.output.dense.weight[:, values] /= scale
    return planted


def outlier_channels(geometry: Geometry, seed: int = 0) -> npt.NDArray[np.int64]:
    """Rows of the projections that are scaled, [layers, 2 (keys, values), 2 * heads].

    Each head has one pair (i, i + head_dim / 2), which RoPE rotates together.
    """
    half = geometry.head_dim // 2
    generator = np.random.Generator(np.random.PCG64(seed))
    first = generator.integers(0, half, (geometry.num_layers, 2, geometry.num_heads))
    first = first + geometry.head_dim * np.arange(geometry.num_heads)
    return np.concatenate([first, first + half], axis=-1)
