"""Codecs where channels of keys or values are outliers: planted in a copy of the model that computes the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness.embedded import embedded, evaluation_set, exactness, rounded, shipped_proteins
from benchmarks.harness.measure import Case, Figures
from benchmarks.harness.names import COMPRESSED
from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRESETS
from esm_turbo.evaluate.protocols import Protein, leave_one_out
from esm_turbo.files.families import projections_of
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.calibration.records import calibrate_records

PLANTS = {
    "outliers x1": (("key", "value"), 1),
    "keys x10": (("key",), 10),
    "keys x60": (("key",), 60),
    "outliers x10": (("key", "value"), 10),
    "outliers x60": (("key", "value"), 60),
}
"""Channels that are planted and their factor, by case."""
PLANTED = (
    *COMPRESSED,
    "fp8", "int4", "kivi4", "kivi2", "qjl_outliers", "qjl", "spectral_layers", "spectral8", "spectral",
)  # fmt: skip

_DOMAINS, _CALIBRATION = 8, 60


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case for each of `PLANTS`, with a row for each preset: leave-one-out."""
    proteins = evaluation_set("cath_val200", min(_DOMAINS, max_proteins or _DOMAINS))
    for case, (kinds, scale) in PLANTS.items():
        yield Case(
            name=case,
            model=EMBEDDED_MODEL.name,
            shape={"dtype": "float32", "set": "cath_val200.fasta", "tested": len(proteins)},
            check=lambda: exactness(proteins[0]),
            measure=functools.partial(_measure, proteins, kinds, scale),
        )


def _measure(proteins: Sequence[ProteinRecord], kinds: Sequence[str], scale: float, repeats: int) -> list[Figures]:
    configs = {name: PRESETS[name] for name in PLANTED}
    turbo = TurboEsm(with_outliers(embedded().model, scale, kinds), embedded().tokenizer)
    calibration = calibrate_records(turbo, shipped_proteins()[:_CALIBRATION], presets=configs.values())
    turbo.model.set_turbo(calibration=calibration)
    chosen = [Protein(record.id, record.sequence) for record in proteins]
    arms = leave_one_out(turbo, chosen, configs, lambda done: None, layers=False)
    found = {name: asdict(arms.turbo_frozen[name].residues.accuracy()) for name in configs}
    return [{"preset": name, "scale": scale, "residues": rounded(errors)} for name, errors in found.items()]


def with_outliers(
    model: TurboEsmForMaskedLM, scale: float, kinds: Sequence[str] = ("key", "value"), seed: int = 0
) -> TurboEsmForMaskedLM:
    """A copy of a model of ESM-2 that computes the same, with two channels of the keys or values of every head scaled.

    Scaling a RoPE pair of key channels by a and the pair of query channels by 1 / a preserves every score, and scaling
    value channels by a and the columns of the output projection by 1 / a every output.
    """
    planted = copy.deepcopy(model, {id(model.base_model.calibration): None})
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    first = np.random.default_rng(seed).integers(
        0, head_dim // 2, (config.num_hidden_layers, 2, config.num_attention_heads)
    )
    first = first + head_dim * np.arange(config.num_attention_heads)
    channels = torch.from_numpy(np.concatenate([first, first + head_dim // 2], axis=-1))
    with torch.no_grad():
        for layer, (of_keys, of_values) in zip(projections_of(planted.base_model), channels, strict=True):
            query, key, value, output = layer
            if "key" in kinds:
                _scale(key, of_keys, scale)
                _scale(query, of_keys, 1 / scale)
            if "value" in kinds:
                _scale(value, of_values, scale)
                output.weight[:, of_values] /= scale
    return planted


def _scale(linear: nn.Linear, rows: Tensor, factor: float) -> None:
    for parameter in linear.parameters():
        parameter[rows] *= factor
