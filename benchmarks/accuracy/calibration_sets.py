"""Accuracy by the number of proteins of a calibration.

No two shipped proteins share more than two 10-mers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from benchmarks.harness.embedded import evaluated, evaluation_set, exactness, rounded, shipped_proteins
from benchmarks.harness.measure import Case, Figures
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRESETS
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.calibration.records import calibrate_records

_PRESETS = ("paper", "turbo3", "turbo2", "turbo1")
_DRAWS = {640: 1, 200: 3, 60: 3, 20: 3, 10: 3}
# Every fifth domain.
_STRIDE = 5


def size_cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case of each calibration on the next N of the shipped proteins, which are in an order that mixes them."""
    tested = evaluation_set("cath_val200")[::_STRIDE][:max_proteins]
    for size, draws in _DRAWS.items():
        for draw in range(draws):
            chosen = shipped_proteins()[draw * size : (draw + 1) * size]
            yield Case(
                name=f"{size} proteins, draw {draw}",
                model=EMBEDDED_MODEL.name,
                shape={"dtype": "float32", "tested": len(tested)},
                check=lambda: exactness(tested[0]),
                measure=functools.partial(_measure, chosen, tested),
            )


def _measure(calibration: Sequence[ProteinRecord], tested: Sequence[ProteinRecord], repeats: int) -> Figures:
    presets = {name: PRESETS[name] for name in _PRESETS}
    plain = TurboEsm.from_pretrained(calibration=False, device="cpu")
    made = calibrate_records(plain, calibration, presets=presets.values())
    evaluation = evaluated(TurboEsm.from_pretrained(calibration=made, device="cpu"), tested, presets, extend_ks=())
    found = {}
    for preset in rounded(evaluation.to_dict())["presets"]:
        leave_one_out = preset["leave_one_out"]
        found[preset["name"]] = {"all": leave_one_out["against_frozen"]["residues"], **leave_one_out["by_class"]}
    return {
        "calibration_proteins": len(calibration),
        "calibration_residues": sum(len(protein.sequence) for protein in calibration),
        "presets": found,
    }
