"""Agreement of the rankings of the cached arms with the full arm, on real targets and peptides.

The candidates of each of the 92 targets are its own peptide, shuffled copies of it, and peptides of other targets. For
each target, a row has the difference of each arm's scores from those of the full arm, the agreement of the rankings,
and the rank of the target's own peptide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.harness.embedded import embedded, rounded
from benchmarks.harness.measure import Case, Check, Figures, worst
from benchmarks.harness.names import screening_arms
from benchmarks.speed.scoring import plain_scores
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL, evaluation_proteins
from esm_turbo.files.csv_files import read_csv
from esm_turbo.tasks.scoring.score import Scores

FILE = "peptide_targets_dev.csv"
SHUFFLED, SWAPPED, TOP_K, SEED = 10, 9, 5, 0

_GROUPS = 23
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Screen:
    """One target and its candidates.

    Attributes:
        name: PDB entry and chains.
        target: residues.
        candidates: its own peptide first, then shuffled copies of it, then those of other targets.
    """

    name: str
    target: str
    candidates: tuple[str, ...]


def screens(max_targets: int | None = None) -> list[Screen]:
    """The targets by length; with `max_targets`, a selection evenly spaced in that order."""
    rows = read_csv(
        evaluation_proteins().with_name(FILE), ["PDB", "Receptor", "Peptide", "Sequence", "Receptor Sequence"]
    )
    made = []
    for row in rows:
        own = row["Sequence"]
        name = f"{row['PDB']}_{row['Receptor']}_{row['Peptide']}"
        rng = random.Random(f"{SEED} {name}")
        shuffled = ["".join(rng.sample(own, len(own))) for _ in range(SHUFFLED)]
        others = rng.sample([one["Sequence"] for one in rows if one["Sequence"] != own], SWAPPED)
        made.append(Screen(name, row["Receptor Sequence"], (own, *shuffled, *others)))
    made.sort(key=lambda screen: len(screen.target))
    count = len(made) if max_targets is None else min(max_targets, len(made))
    return [made[index * len(made) // count] for index in range(count)]


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case and row per group of a few targets, each with short and long ones."""
    chosen = screens(max_proteins)
    groups = min(_GROUPS, len(chosen))
    for number in range(groups):
        yield _case(f"group {number + 1} of {groups}", chosen[number::groups], max_proteins)


def _case(name: str, group: Sequence[Screen], max_targets: int | None) -> Case:
    def measure(repeats: int) -> Figures:
        return {"targets_scored": [rounded(_measure(screen)) for screen in group]}

    return Case(
        name=name,
        model=EMBEDDED_MODEL.name,
        shape={
            "dtype": "float32",
            "max_targets": max_targets,
            "shuffled": SHUFFLED,
            "swapped": SWAPPED,
            "seed": SEED,
            "top_k": TOP_K,
        },
        check=lambda: check(group[0]),
        measure=measure,
    )


def _measure(screen: Screen) -> Figures:
    turbo = embedded()
    full = turbo.score(screen.target, screen.candidates, arm="full")
    found = {"full": _places(full)}
    for name, (preset, options) in screening_arms().items():
        scores = with_preset(turbo, preset, partial(turbo.score, screen.target, screen.candidates, **options))
        agreement = scores.agreement(full, TOP_K)
        found[name] = _places(scores) | {
            "spearman": agreement.spearman,
            "top_k_overlap": agreement.top_k_overlap,
            "mean_difference": agreement.mean_difference,
        }
    return {"target": screen.name, "residues": len(screen.target), "arms": found}


def with_preset(turbo: TurboEsm, preset: str, call: Callable[[], Any]) -> Any:
    """Result of a call with contexts stored by a preset."""
    before = turbo.model.esm.turbo_config
    settings = {"calibration": turbo.calibration, "backend": turbo.model.esm.backend}
    turbo.model.set_turbo(preset=preset, **settings)
    try:
        return call()
    finally:
        turbo.model.set_turbo(preset=before, **settings)


def _places(scores: Scores) -> Figures:
    """Share of decoys ranked below the target's own peptide, ties counted half; 0.5 is chance."""
    own, *decoys = scores.pseudo_perplexities
    return {
        "ahead_of_shuffled": _ahead(own, decoys[:SHUFFLED]),
        "ahead_of_swapped": _ahead(own, decoys[SHUFFLED:]),
    }


def _ahead(own: float, decoys: Sequence[float]) -> float:
    return sum(1.0 if own < decoy else 0.5 * (own == decoy) for decoy in decoys) / len(decoys)


def check(screen: Screen) -> Check:
    """Compare the full arm with Hugging Face's model, on the end of a target."""
    turbo, target, own = embedded(), screen.target[-80:], screen.candidates[0]
    [full] = turbo.score(target, own, arm="full").scores
    differences = (abs(a - b) for a, b in zip(full.log_probabilities, plain_scores(turbo, target, own), strict=True))
    return Check("full arm against Hugging Face's model, largest difference", worst(differences), _TOLERANCE)
