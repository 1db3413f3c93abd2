"""What follows the scores of a screen: comparing candidates with a background, and scoring the best again exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import Arm, SortBy
from esm_turbo.tasks.scoring.records import Candidate, ScoringRun, TargetResult
from esm_turbo.tasks.scoring.score import Scores, compared

ScoreMore = Callable[[Sequence[ProteinRecord], Sequence[Candidate], Sequence[Arm]], ScoringRun]
"""Scores candidates on targets in some arms, with the other options of the run."""


def score_in(contexts: Sequence[ProteinRecord], run: ScoringRun, score_more: ScoreMore) -> list[TargetResult]:
    """Score the candidates of a run in the contexts of a background; those that fail are added to its failures."""
    if not run.results:
        return []
    arms = list(run.results[0].scores)
    unique = dict.fromkeys(score.candidate for one in run.results for score in one.scores[arms[0]].scores)
    elsewhere = score_more(contexts, [Candidate(sequence, sequence) for sequence in unique], arms)
    run.failed += elsewhere.failed
    return elsewhere.results


def compare(run: ScoringRun, background: str, elsewhere: Sequence[TargetResult] | None = None) -> None:
    """Give the scores of a run their specificity.

    Args:
        run: the scores, which are changed.
        background: `targets`, `alone` or `decoys`.
        elsewhere: scores in the contexts of the background. None, for `targets`, compares those on all other targets;
            candidates that are scored on one alone have no specificity.
    """
    if not run.results:
        return
    targets, by_arm = [one.target.sequence for one in run.results], dict[Arm, list[Scores]]()
    for arm in run.results[0].scores:
        others = None if elsewhere is None else [one.scores[arm] for one in elsewhere]
        by_arm[arm] = compared(targets, [one.scores[arm] for one in run.results], background, others)
    run.results = [
        replace(one, scores={arm: own[number] for arm, own in by_arm.items()}) for number, one in enumerate(run.results)
    ]


def sort(run: ScoringRun, sort_by: SortBy) -> None:
    """Rank the candidates of a run by likelihood or by specificity."""
    run.results = [replace(one, sort_by=sort_by) for one in run.results]


def rescore(
    run: ScoringRun, top: int, contexts: Sequence[ProteinRecord], score_more: ScoreMore, score_elsewhere: ScoreMore
) -> None:
    """Score the best candidates of every target again by the arm `full`, in their background too if that ranks them.

    Args:
        run: the scores, which are changed; candidates that failed are added to its failures.
        top: number of candidates per target.
        contexts: of the background; none for `targets`.
        score_more: scores them.
        score_elsewhere: scores them in the contexts.
    """
    compares = any(one.sort_by == "specificity" for one in run.results)
    best = {one.target.id: [one.candidates[index] for index in one.ranking()[:top]] for one in run.results}
    if compares and not contexts:
        # Other targets are a background for those that are scored on them.
        sequences = {one.sequence for own in best.values() for one in own}
        best = {one.target.id: [c for c in one.candidates if c.sequence in sequences] for one in run.results}
    chosen = [replace(one, target=name) for name, own in best.items() for one in own]
    again = score_more([one.target for one in run.results], chosen, ["full"])
    if compares:
        elsewhere = score_in(contexts, again, score_elsewhere) if contexts else None
        compare(again, "decoys" if contexts else "targets", elsewhere)
    run.failed += again.failed
    by_target = {one.target.id: one for one in again.results}
    for number, one in enumerate(run.results):
        found = by_target.get(one.target.id)
        exact = None if found is None else found.scores["full"]
        first = one.scores[one.reference].with_exact(one.ranking()[:top], exact)
        run.results[number] = replace(one, scores={**one.scores, one.reference: first})


def shared_candidates(targets: Sequence[ProteinRecord], candidates: Sequence[Candidate]) -> bool:
    """Whether some candidate is scored on several different targets."""
    residues = {one.id: one.sequence for one in targets}
    everywhere = set(residues.values())
    own: dict[str, set[str]] = {}
    for one in candidates:
        known = own.setdefault(one.sequence, set())
        known |= everywhere if one.target is None else {residues[one.target]} if one.target in residues else set()
        if len(known) > 1:
            return True
    return False
