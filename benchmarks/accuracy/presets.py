"""Accuracy and memory of presets on the small models: a case per protein set, with a row of every preset."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.harness.embedded import evaluated, evaluation_set, exactness, rounded, small_model
from benchmarks.harness.measure import Case, Check, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import TurboConfig
from esm_turbo.evaluate import Evaluation

SETS = ("cath_val200", "long_human")
"""Evaluation sets: CATH domains below 350 residues, and human proteins of 600 to 1,022."""
_EXTENSION: Mapping[str, Sequence[int]] = {"extend_ks": (1, 8, 32), "refresh_ws": (0, 8, 32)}


def preset_cases(
    presets: Mapping[str, TurboConfig],
    sets: Sequence[str] = SETS,
    max_proteins: int | None = None,
    model: str = EMBEDDED_MODEL.name,
) -> Iterator[Case]:
    """Leave-one-out and extension by every preset; what they are compared with is computed once per set.

    Args:
        presets: by name.
        sets: names of evaluation sets.
        max_proteins: use only the first N proteins of every set; None for all.
        model: one of `SMALL_MODELS`.
    """
    for name in sets:
        yield Case(
            name=name,
            model=model,
            shape={"dtype": "float32", "max_proteins": max_proteins},
            check=functools.partial(_check, model),
            measure=functools.partial(_measure, presets, name, max_proteins, model),
        )


def _measure(
    presets: Mapping[str, TurboConfig], name: str, max_proteins: int | None, model: str, repeats: int
) -> list[Figures]:
    begin = time.perf_counter()
    proteins = evaluation_set(name, max_proteins)
    evaluation = evaluated(small_model(model), proteins, presets, **_EXTENSION)
    shared = {
        "proteins": f"{name}.fasta",
        "seconds_taken": round(time.perf_counter() - begin, 1),
        "provenance": _provenance(evaluation),
    }
    return [shared | {"preset": figures} for figures in rounded(evaluation.to_dict())["presets"]]


@functools.cache
def _check(model: str) -> Check:
    return exactness(evaluation_set("cath_val200", 1)[0], model)


def _provenance(evaluation: Evaluation) -> Figures:
    """Provenance of an evaluation, without the parts that every record has."""
    provenance = evaluation.provenance
    calibration = provenance.calibration or {}
    return {
        "proteins": provenance.proteins,
        "residues": provenance.residues,
        "sequences_sha256": provenance.sequences_sha256,
        "geometry": dict(provenance.geometry),
        "dtype": provenance.dtype,
        "backend": provenance.backend,
        "calibration": {name: calibration.get(name) for name in ("sequences", "residues", "fasta")},
    }
