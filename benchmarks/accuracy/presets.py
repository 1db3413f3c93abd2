"""Accuracy and memory of presets on the small models: cases by protein set, with a row of every preset."""

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
_NONE: Mapping[str, Sequence[int]] = {"extend_ks": ()}


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
        yield _case(name, name, presets, max_proteins, model, _EXTENSION)


def codec_cases(
    presets: Mapping[str, TurboConfig], sets: Sequence[str] = SETS, max_proteins: int | None = None
) -> Iterator[Case]:
    """Leave-one-out by every preset, each in a case of its own, so that one can be measured again."""
    for name, config in presets.items():
        for proteins in sets:
            yield _case(f"{proteins}, {name}", proteins, {name: config}, max_proteins, EMBEDDED_MODEL.name, _NONE)


def _case(
    name: str,
    proteins: str,
    presets: Mapping[str, TurboConfig],
    max_proteins: int | None,
    model: str,
    extension: Mapping[str, Sequence[int]],
) -> Case:
    return Case(
        name=name,
        model=model,
        shape={"dtype": "float32", "max_proteins": max_proteins},
        check=functools.partial(_check, model),
        measure=functools.partial(_measure, proteins, presets, max_proteins, model, extension),
    )


def _measure(
    name: str,
    presets: Mapping[str, TurboConfig],
    max_proteins: int | None,
    model: str,
    extension: Mapping[str, Sequence[int]],
    repeats: int,
) -> list[Figures]:
    begin = time.perf_counter()
    proteins = evaluation_set(name, max_proteins)
    evaluation = evaluated(small_model(model), proteins, presets, **extension)
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
