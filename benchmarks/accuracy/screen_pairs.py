"""Scores of pairs in batches filled across targets against those of one target at a time, on real targets and peptides.

All different targets of `screening.FILE` with some of its peptides: by length, evenly spaced in that order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.accuracy import screening
from benchmarks.harness.embedded import embedded, rounded
from benchmarks.harness.measure import Case, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.scoring.score import Scores

ARMS: tuple[Arm, ...] = ("frozen", "turbo")


def pairs(peptides: int | None = None, max_targets: int | None = None) -> tuple[list[str], list[str]]:
    """Different targets and different peptides: all, or a number of each, the peptides by length, evenly spaced."""
    screens = screening.screens()
    targets = list(dict.fromkeys(screen.target for screen in screens))
    own = sorted({screen.candidates[0] for screen in screens}, key=lambda one: (len(one), one))
    return _spaced(targets, max_targets), _spaced(own, peptides)


def cases(peptides: int | None = None, max_targets: int | None = None) -> Iterator[Case]:
    """One case and row per arm.

    Args:
        peptides: number of peptides that are scored on every target; None for all.
        max_targets: maximum number of targets; None for all.
    """
    for arm in ARMS:
        yield _case(arm, peptides, max_targets)


def _spaced(items: list[str], count: int | None) -> list[str]:
    count = len(items) if count is None else min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _case(arm: Arm, peptides: int | None, max_targets: int | None) -> Case:
    return Case(
        name=f"{arm}: pairs of all targets against one target at a time",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "arm": arm, "peptides": peptides, "max_targets": max_targets},
        check=lambda: screening.check(screening.screens()[0]),
        measure=lambda repeats: rounded(_measure(arm, *pairs(peptides, max_targets))),
    )


def _measure(arm: Arm, targets: list[str], peptides: list[str]) -> Figures:
    turbo = embedded()
    begin = time.perf_counter()
    together = turbo.score_pairs(targets, peptides, arm=arm)
    middle = time.perf_counter()
    alone = [turbo.score(target, peptides, arm=arm) for target in targets]
    end = time.perf_counter()
    own = [together[number] for number in range(len(targets))]
    of_residues = np.abs(np.concatenate([_residues(a) - _residues(b) for a, b in zip(own, alone, strict=True)]))
    of_means = np.abs(np.concatenate([_means(a) - _means(b) for a, b in zip(own, alone, strict=True)]))
    return {
        "target_residues": sum(map(len, targets)),
        "pairs": len(targets) * len(peptides),
        "peptides": [len(one) for one in peptides],
        "preset": own[0].preset,
        "largest_difference": float(of_residues.max()),
        "quantile_99_difference": float(np.quantile(of_residues, 0.99)),
        "largest_difference_per_residue": float(of_means.max()),
        "same_rankings": sum(a.ranking() == b.ranking() for a, b in zip(own, alone, strict=True)),
        "took": {"pairs": middle - begin, "one target at a time": end - middle},
    }


def _residues(scores: Scores) -> Any:
    return np.array([value for one in scores.scores for value in one.log_probabilities])


def _means(scores: Scores) -> Any:
    return np.log(scores.pseudo_perplexities)
