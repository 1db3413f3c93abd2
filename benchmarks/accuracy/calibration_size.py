"""Leave-one-out accuracy by the size of the calibration set.

The shipped file is ordered so that its first N proteins are representative of the whole; a *draw* is the next N.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from benchmarks.harness.embedded import (
    about,
    embedded,
    evaluate,
    evaluation_set,
    exactness,
    rounded,
    shipped_proteins,
    with_calibration,
)
from benchmarks.harness.measure import Case, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRESETS
from esm_turbo.tasks.calibration.records import calibrate_records

DRAWS: Mapping[int, int] = {640: 1, 200: 3, 60: 5, 20: 5, 10: 5}
"""Number of draws by number of proteins."""
TESTED_PRESETS = ("turbo3", "turbo2", "turbo1", "paper")
# Step between the proteins of a set that are evaluated.
_STRIDES = {"cath_val200": 5, "long_human": 3}


def cases(draws: Mapping[int, int] = DRAWS, max_proteins: int | None = None) -> Iterator[Case]:
    """One case per calibration, with one row per protein set.

    Args:
        draws: number of calibrations by number of proteins.
        max_proteins: maximum number of proteins to evaluate per set.
    """
    for size, count in draws.items():
        for draw in range(count):
            yield _case(size, draw, max_proteins)


def _case(size: int, draw: int, max_proteins: int | None) -> Case:
    calibration = shipped_proteins()[draw * size : (draw + 1) * size]

    def measure(repeats: int) -> list[Figures]:
        presets = {name: PRESETS[name] for name in TESTED_PRESETS}
        begin = time.perf_counter()
        made = calibrate_records(embedded(), calibration, presets=presets.values())
        seconds = time.perf_counter() - begin
        turbo = with_calibration(made)
        rows = []
        for name, stride in _STRIDES.items():
            evaluation = evaluate(turbo, evaluation_set(name)[::stride][:max_proteins], presets)
            whole = rounded(evaluation.to_dict())
            rows.append(
                {
                    "calibration_proteins": size,
                    "calibration_residues": sum(len(p.sequence) for p in calibration),
                    "calibration_seconds": round(seconds, 1),
                    "draw": draw,
                    "proteins": f"{name}.fasta",
                    "provenance": about(evaluation),
                    "presets": {p["name"]: p["leave_one_out"]["against_frozen"]["residues"] for p in whole["presets"]},
                }
            )
        return rows

    return Case(
        name=f"{size} proteins, draw {draw}",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "strides": dict(_STRIDES), "max_proteins": max_proteins},
        check=lambda: exactness(evaluation_set("cath_val200", 1)[0]),
        measure=measure,
    )
