"""Accuracy and memory of presets on the embedded model, one row per preset and protein set; and planted outliers."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.embedded import SETS, about, embedded, evaluate, evaluation_set, exactness, rounded, small_model
from benchmarks.harness.measure import Case, Check, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import COMPARISON_PRESETS, OPTIONAL_PRESETS, PRODUCT_PRESETS, TurboConfig
from esm_turbo.evaluate.outliers import planted_accuracy
from esm_turbo.evaluate.protocols import Protein
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.arms import FROZEN

EXTENSION: Mapping[str, Any] = {"extend_ks": (1, 8, 32), "refresh_ws": (0, 8, 32)}
OUTLIER_SCALES = (1, 10, 60, 200)
OUTLIER_PROTEINS, OUTLIER_CALIBRATION_PROTEINS = 8, 60

ALL_PRESETS = PRODUCT_PRESETS | COMPARISON_PRESETS


def preset_cases(
    presets: Mapping[str, TurboConfig],
    sets: Sequence[str] = SETS,
    max_proteins: int | None = None,
    model: str = EMBEDDED_MODEL.name,
) -> Iterator[Case]:
    """Figures 1 to 4 of every preset on every protein set.

    Args:
        presets: by name.
        sets: names of evaluation sets.
        max_proteins: use only the first N proteins of every set; None for all.
        model: one of `SMALL_MODELS`.
    """
    for name in sets:
        for preset, config in presets.items():
            yield _preset_case(name, preset, config, max_proteins, model)


def optional_cases(max_proteins: int | None = None) -> Iterator[Case]:
    """The same for the installed backends of Hugging Face's `QuantizedCache`."""
    installed = {}
    for name, config in OPTIONAL_PRESETS.items():
        try:
            embedded().model.esm.codec(config)
        except ValueError as error:
            print(f"{name}: {error}")
        else:
            installed[name] = config
    yield from preset_cases(installed, SETS, max_proteins)


def outlier_cases(
    presets: Mapping[str, TurboConfig], max_proteins: int | None = None, model: str = EMBEDDED_MODEL.name
) -> Iterator[Case]:
    """Figure 5: one case per scale of the outliers, with one row per preset."""
    proteins = evaluation_set("cath_val200", min(OUTLIER_PROTEINS, max_proteins or OUTLIER_PROTEINS))
    compressed = {name: config for name, config in presets.items() if config.codec != FROZEN.codec}
    for scale in OUTLIER_SCALES:
        yield _outlier_case(scale, proteins, compressed, model)


def _preset_case(
    set_name: str,
    preset: str,
    config: TurboConfig,
    max_proteins: int | None,
    model: str,
) -> Case:
    def measure(repeats: int) -> Figures:
        begin = time.perf_counter()
        proteins = evaluation_set(set_name, max_proteins)
        evaluation = evaluate(small_model(model), proteins, {preset: config}, **EXTENSION)
        whole = rounded(evaluation.to_dict())
        [figures] = whole["presets"]
        return {
            "proteins": f"{set_name}.fasta",
            "seconds_taken": round(time.perf_counter() - begin, 1),
            "provenance": about(evaluation),
            "preset": figures,
        }

    return Case(
        name=f"{preset} on {set_name}",
        model=model,
        shape={"dtype": "float32", "max_proteins": max_proteins},
        check=functools.partial(_check, model),
        measure=measure,
    )


def _outlier_case(
    scale: float, proteins: Sequence[ProteinRecord], presets: Mapping[str, TurboConfig], model: str
) -> Case:
    def measure(repeats: int) -> list[Figures]:
        tested = [Protein(p.id, p.sequence, p.structural_class) for p in proteins]
        planted, accuracies = planted_accuracy(
            small_model(model), tested, presets, scale, OUTLIER_CALIBRATION_PROTEINS, lambda done: None
        )
        shared = {
            "proteins": "cath_val200.fasta",
            "tested": len(proteins),
            "calibration_proteins": OUTLIER_CALIBRATION_PROTEINS,
            "scale": scale,
            "drift": rounded(dataclasses.asdict(planted.drift)),
        }
        return [
            shared
            | {
                "preset": name,
                "options": presets[name].to_dict(),
                "against_frozen": rounded(dataclasses.asdict(accuracy.against_frozen)),
            }
            for name, accuracy in accuracies.items()
        ]

    return Case(
        name=f"outliers x{scale:g}",
        model=model,
        shape={"dtype": "float32", "calibration_proteins": OUTLIER_CALIBRATION_PROTEINS},
        check=functools.partial(_check, model),
        measure=measure,
    )


@functools.cache
def _check(model: str) -> Check:
    return exactness(evaluation_set("cath_val200", 1)[0], model)
