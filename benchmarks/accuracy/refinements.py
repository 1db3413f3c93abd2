"""Benefit of the last sign planes of the turbo presets: leave-one-out with and without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.accuracy.calibration_export import TURBO_PRESETS
from benchmarks.harness.embedded import embedded, evaluation_set, exactness, rounded
from benchmarks.harness.measure import Case, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRESETS
from esm_turbo.evaluate.contexts import prefill
from esm_turbo.evaluate.protocols import Comparison, Protein, extend_each_token
from esm_turbo.evaluate.summary import token_accuracy
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.arms import FROZEN

# Step between the domains that are evaluated.
_STRIDE = 5


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case per turbo preset with sign planes that can be dropped."""
    proteins = evaluation_set("cath_val200")[::_STRIDE][:max_proteins]
    for preset in TURBO_PRESETS:
        codec = embedded().model.esm.codec(PRESETS[preset])
        if any(codec.refinements(layer) for layer in range(codec.geometry.num_layers)):
            yield _case(preset, proteins)


def _case(preset: str, proteins: Sequence[ProteinRecord]) -> Case:
    @torch.no_grad()
    def measure(repeats: int) -> Figures:
        turbo, config = embedded(), PRESETS[preset]
        whole, dropped = Comparison(f"{preset} against frozen"), Comparison(f"{preset} without planes against frozen")
        stored = {"whole": 0, "dropped": 0}
        tokens = 0
        for record in proteins:
            protein = Protein(record.id, record.sequence, record.structural_class)
            ids = torch.tensor([protein.token_ids(turbo.codes)])
            special = np.isin(ids[0].numpy(), turbo.model.esm.special_ids)
            _, caches = prefill(turbo.model, [FROZEN, config], ids, torch.ones_like(ids))
            frozen = extend_each_token(turbo.model, caches[FROZEN], ids[0])
            cache = caches[config]
            stored["whole"] += cache.nbytes
            whole.add(protein, 0, frozen, extend_each_token(turbo.model, cache, ids[0]), special)
            cache.drop_refinements()
            stored["dropped"] += cache.nbytes
            dropped.add(protein, 0, frozen, extend_each_token(turbo.model, cache, ids[0]), special)
            tokens += len(special)
        elements = cache.geometry.elements_per_token * tokens
        return {
            "preset": preset,
            "proteins": "cath_val200.fasta",
            "tested": len(proteins),
            "whole": _part(whole, stored["whole"], elements),
            "dropped": _part(dropped, stored["dropped"], elements),
        }

    return Case(
        name=preset,
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "stride": _STRIDE, "tested": len(proteins)},
        check=lambda: exactness(proteins[0]),
        measure=measure,
    )


def _part(comparison: Comparison, nbytes: int, elements: int) -> Figures:
    figures: Figures = rounded(dataclasses.asdict(token_accuracy(comparison)))
    return {"bits_per_element": round(8 * nbytes / elements, 4), "against_frozen": figures}
