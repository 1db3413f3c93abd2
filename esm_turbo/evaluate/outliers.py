"""Outlier channels planted in a copy of a model that still computes the same function, and presets measured on it.

Scaling a RoPE pair of key channels by a and the same pair of query channels by 1/a preserves every attention score;
scaling value channels by a and the matching columns of the output projection by 1/a preserves every output. A cache of
keys and values then has channels a times larger than before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from esm_turbo.assets import calibration_proteins as shipped_proteins
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.evaluate.contexts import as_outputs, prefill
from esm_turbo.evaluate.protocols import Advance, Comparison, Protein, leave_one_out
from esm_turbo.evaluate.results import OutlierAccuracy, PlantedModel
from esm_turbo.evaluate.summary import token_accuracy
from esm_turbo.files.families import projections_of
from esm_turbo.proteins.fasta import read_fasta_strict
from esm_turbo.tasks.calibration.records import calibrate_records

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
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


@torch.no_grad()
def planted_accuracy(
    turbo: ContextModel,
    proteins: Sequence[Protein],
    configs: Mapping[str, TurboConfig],
    scale: float,
    calibration_proteins: int,
    advance: Advance,
) -> tuple[PlantedModel, dict[str, OutlierAccuracy]]:
    """Plant outliers of one scale in a copy of a model, calibrate it, and measure presets on it.

    Args:
        turbo: the model; it is not modified.
        proteins: to measure on.
        configs: the presets by name.
        scale: factor of the channels, see `with_outliers`.
        calibration_proteins: number of shipped proteins that the copy is calibrated on.
        advance: called with 1 after every protein.

    Returns:
        The error of the copy's forward pass against the model's, and the accuracy of every preset against full
        precision, measured on the copy.
    """
    planted = type(turbo)(with_outliers(turbo.model, scale), turbo.tokenizer)
    records = read_fasta_strict(shipped_proteins())[:calibration_proteins]
    planted.model.set_turbo(
        calibration=calibrate_records(planted, records, presets=configs.values()),
        preset=turbo.model.base_model.turbo_config,
        backend=turbo.model.base_model.backend,
    )
    drift = Comparison(f"outliers x{scale:g}")
    for protein in proteins:
        input_ids = torch.tensor([protein.token_ids(turbo.codes)])
        before, after = (
            as_outputs(prefill(model, [], input_ids, torch.ones_like(input_ids))[0], 0, slice(None))
            for model in (turbo.model, planted.model)
        )
        drift.add(protein, 0, before, after, np.isin(input_ids[0].numpy(), turbo.model.base_model.special_ids))
    arms = leave_one_out(planted, proteins, configs, advance)
    return PlantedModel(scale, token_accuracy(drift)), {
        name: OutlierAccuracy(scale, token_accuracy(comparison)) for name, comparison in arms.turbo_frozen.items()
    }
