"""Outlier channels of a given scale, planted in a copy of a model that still computes the same function.

Scaling a RoPE pair of key channels by a and the same pair of query channels by 1/a preserves every attention score;
scaling value channels by a and the matching columns of the output projection by 1/a preserves every output. A cache of
keys and values then has channels a times larger than before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from esm_turbo.config import Geometry
from esm_turbo.files.families import projections_of

if TYPE_CHECKING:
    from esm_turbo.model.masked_lm import CachedMaskedLM


def with_outliers(
    model: CachedMaskedLM, scale: float, seed: int = 0, *, kinds: Collection[str] = ("key", "value")
) -> CachedMaskedLM:
    """A copy of a model with one pair of key channels and one pair of value channels of every head scaled.

    The copy computes the same function up to the rounding of its dtype (in bfloat16, a scale that is not a power of two
    rounds the scaled weights once more).

    Args:
        model: it is not modified.
        scale: factor of the channels; 1 gives a plain copy.
        seed: of the choice of channels.
        kinds: `key`, `value` or both; the channels of the others are left alone.

    Returns:
        The copy, without a calibration, since that of the model no longer fits.

    Raises:
        ValueError: `scale` is not a positive number.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"`scale` must be a positive number, got {scale}")
    planted = copy.deepcopy(model, {id(model.base_model.calibration): None})
    encoder, geometry = planted.base_model, Geometry.of(model.config)
    channels = torch.from_numpy(outlier_channels(geometry, seed))
    with torch.no_grad():
        for index, (layer, (keys, values)) in enumerate(zip(projections_of(encoder), channels, strict=True)):
            of_queries, of_keys, of_values = encoder.channel_parameters(index)
            if "key" in kinds:
                for parameter in of_keys:
                    parameter[keys] *= scale
                for parameter in of_queries:
                    parameter[keys] *= 1 / scale
            if "value" in kinds:
                for parameter in of_values:
                    parameter[values] *= scale
                layer[-1].weight[:, values] /= scale
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
