"""Accuracy and memory of presets on the embedded model, one row per preset and protein set."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.embedded import SETS, about, embedded, evaluate, evaluation_set, exactness, rounded, small_model
from benchmarks.harness.measure import Case, Check, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import COMPARISON_PRESETS, OPTIONAL_PRESETS, PRODUCT_PRESETS, TurboConfig

EXTENSION: Mapping[str, Any] = {"extend_ks": (1, 8, 32), "refresh_ws": (0, 8, 32)}

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


@functools.cache
def _check(model: str) -> Check:
    return exactness(evaluation_set("cath_val200", 1)[0], model)
