"""Ranks of true binders among the peptides of other targets, by likelihood and by specificity.

Every peptide of `peptide_targets_dev.csv` is scored on every target. For each background and figure, a row has the rank
of each target's own peptide and how much the rankings of different targets resemble each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations

import numpy as np

from benchmarks.accuracy.screening import Screen, check, screens
from benchmarks.harness.embedded import embedded, rounded
from benchmarks.harness.measure import Case, Figures
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.tasks.common.options import Background
from esm_turbo.tasks.common.rankings import spearman
from esm_turbo.tasks.scoring.pairs import PairScores
from esm_turbo.tasks.scoring.score import CandidateScore
from esm_turbo.tasks.scoring.specificity import background_contexts, figures_in, figures_on_others

_BACKGROUNDS: tuple[Background, ...] = ("alone", "decoys", "targets")
_NUMBERS: dict[str, Callable[[CandidateScore], float | None]] = {
    "specificity": lambda one: one.specificity,
    "specificity_z": lambda one: one.specificity_z,
}


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """All targets, or some evenly spaced by length: ranks by likelihood and by the specificity of each background."""
    chosen = screens(max_proteins)
    yield Case(
        name="all pairs",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "targets": len(chosen), "candidates": len({one.candidates[0] for one in chosen})},
        check=lambda: check(chosen[0]),
        measure=partial(_measure, chosen),
    )


def _measure(chosen: Sequence[Screen], repeats: int) -> Figures:
    own = [one.candidates[0] for one in chosen]
    targets, candidates = (list(dict.fromkeys(names)) for names in ([one.target for one in chosen], own))
    at = [targets.index(one.target) for one in chosen]
    plain = embedded().score_pairs(targets, candidates, background="none")
    found = {"likelihood": places(plain, at, own, lambda one: one.mean_log_probability)}
    for background in _BACKGROUNDS:
        compared = _compared(plain, targets, candidates, background)
        for name, number in _NUMBERS.items():
            if number(compared[0].scores[0]) is not None:
                found[f"{name}, {background}"] = places(compared, at, own, number)
    return rounded({"numbers": found})


def _compared(plain: PairScores, targets: Sequence[str], candidates: list[str], background: Background) -> PairScores:
    """Scores with a background, without computing the pairs again."""
    scores = [plain[index] for index in range(len(targets))]
    if background == "targets":
        figures = figures_on_others([(t, one.by_candidate()) for t, one in zip(targets, scores, strict=True)])
    else:
        contexts = [record.sequence for record in background_contexts(background, 1)[1]]
        elsewhere = embedded().score_pairs(contexts, candidates, background="none")
        shared = figures_in(elsewhere[index].by_candidate() for index in range(len(contexts)))
        figures = [shared] * len(targets)
    pairs = zip(scores, figures, strict=True)
    return PairScores(tuple(one.with_background(known, background) for one, known in pairs), {})


def places(
    scores: PairScores, at: Sequence[int], own: Sequence[str], number: Callable[[CandidateScore], float | None]
) -> Figures:
    """Ranks of peptides on their targets by a number of which more is better.

    Args:
        scores: of the same candidates on every target.
        at: index of the target of each peptide.
        own: the peptides.
        number: the number.

    Returns:
        `percentiles`, for each peptide the share of other candidates ahead of it, ties counted half: 0 is best and 0.5
        chance; `first`, how many are first; `between_targets`, the mean rank correlation of two targets' numbers.
    """
    values = np.array([[_known(number(one)) for one in scores[index].scores] for index in range(len(scores))])
    names = [one.candidate for one in scores[0].scores]
    percentiles = []
    for target, peptide in zip(at, own, strict=True):
        mine, others = values[target, names.index(peptide)], np.delete(values[target], names.index(peptide))
        percentiles.append(float((others > mine).mean() + (others == mine).mean() / 2))
    known = (spearman(values[a], values[b]) for a, b in combinations(range(len(values)), 2))
    between = [one for one in known if one is not None]
    first = sum(one == 0 for one in percentiles)
    return {"percentiles": percentiles, "first": first, "between_targets": float(np.mean(between))}


def _known(value: float | None) -> float:
    assert value is not None
    return value
