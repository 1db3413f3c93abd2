"""What follows the scores of a screen: comparing candidates with a background, and scoring the best again exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.scoring.records import Candidate, ScoringRun, TargetResult
from esm_turbo.tasks.scoring.score import Scores, chosen_again, compared
from esm_turbo.tasks.scoring.specificity import are_compared

ScoreMore = Callable[..., ScoringRun]
"""Scores candidates on targets in some arms and a `stage`, with the other options of the run, as `score_records`."""


def score_in(
    contexts: Sequence[ProteinRecord], run: ScoringRun, score_more: ScoreMore, stage: str = "background"
) -> list[TargetResult]:
    """Score the candidates of a run in the contexts of a background; those that fail are added to its failures."""
    if not run.results:
        return []
    arms = list(run.results[0].scores)
    unique = dict.fromkeys(score.candidate for one in run.results for score in one.scores[arms[0]].scores)
    elsewhere = score_more(contexts, [Candidate(sequence, sequence) for sequence in unique], arms, stage=stage)
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
        others = None if elsewhere is None else [(one.target.sequence, one.scores[arm]) for one in elsewhere]
        by_arm[arm] = compared(targets, [one.scores[arm] for one in run.results], background, others)
    run.results = [
        replace(one, scores={arm: own[number] for arm, own in by_arm.items()}) for number, one in enumerate(run.results)
    ]


def rescore(run: ScoringRun, top: int, contexts: Sequence[ProteinRecord], score_more: ScoreMore) -> None:
    """Score the best candidates of every target again by the arm `full`, in their background too if that ranks them.

    Args:
        run: the scores, which are changed; candidates that failed are added to its failures.
        top: number of candidates per target.
        contexts: of the background; none for `targets`.
        score_more: scores them.
    """
    if not run.results:
        return
    background = "decoys" if contexts else "targets"
    best = chosen_again([one.scores[one.reference] for one in run.results], top, background)
    chosen = [
        replace(one.candidates[index], target=one.target.id)
        for one, own in zip(run.results, best, strict=True)
        for index in own
    ]
    again = score_more([one.target for one in run.results], chosen, ["full"], stage="rescore")
    if run.results[0].sort_by == "specificity":
        elsewhere = score_in(contexts, again, score_more, "rescore background") if contexts else None
        compare(again, background, elsewhere)
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
    return are_compared(
        (one.sequence, target)
        for one in candidates
        for target in (everywhere if one.target is None else filter(None, [residues.get(one.target)]))
    )
