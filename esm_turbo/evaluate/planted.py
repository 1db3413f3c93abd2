"""Figure 5: leave-one-out on a model with planted outliers, calibrated again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from esm_turbo.assets import calibration_proteins as shipped_proteins
from esm_turbo.config import TurboConfig
from esm_turbo.evaluate.contexts import as_outputs, prefill
from esm_turbo.evaluate.outliers import with_outliers
from esm_turbo.evaluate.protocols import Advance, Comparison, Protein, leave_one_out
from esm_turbo.evaluate.results import OutlierAccuracy, PlantedModel
from esm_turbo.evaluate.summary import token_accuracy
from esm_turbo.proteins.fasta import read_fasta_strict
from esm_turbo.tasks.calibration.records import calibrate_records

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


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
