"""What follows the scores of a screen: comparing candidates with a background, and scoring the best again exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import Arm, SortBy
from esm_turbo.tasks.scoring.records import Candidate, ScoringRun, TargetResult
from esm_turbo.tasks.scoring.specificity import BackgroundFigures, figures_in, figures_on_others

ScoreMore = Callable[[Sequence[ProteinRecord], Sequence[Candidate], Sequence[Arm]], ScoringRun]
"""Scores candidates on targets in some arms, with the other options of the run."""


def compare(
    run: ScoringRun, background: str, contexts: Sequence[ProteinRecord], score_more: ScoreMore, *, later: bool = False
) -> None:
    """Give the scores of a run their specificity.

    Candidates that are scored on one target alone have none by `targets`.

    Args:
        run: the scores, which are changed; decoys that failed are added to its failures.
        background: `targets`, `alone` or `decoys`.
        contexts: of the background; none for `targets`.
        score_more: scores the candidates in these contexts.
        later: not all `targets` are here, so that the figures are left out until shards are merged.
    """
    if not run.results:
        return
    arms = list(run.results[0].scores)
    figures: dict[Arm, list[dict[str, BackgroundFigures]]]
    if contexts:
        unique = dict.fromkeys(score.candidate for one in run.results for score in one.scores[arms[0]].scores)
        other = score_more(contexts, [Candidate(sequence, sequence) for sequence in unique], arms)
        run.failed += other.failed
        figures = {
            arm: [figures_in(one.scores[arm].by_candidate() for one in other.results)] * len(run.results)
            for arm in arms
        }
    elif later:
        figures = {arm: [{} for _ in run.results] for arm in arms}
    else:
        figures = {
            arm: figures_on_others([(one.target.sequence, one.scores[arm].by_candidate()) for one in run.results])
            for arm in arms
        }
    run.results = [
        replace(
            one, scores={arm: own.with_background(figures[arm][number], background) for arm, own in one.scores.items()}
        )
        for number, one in enumerate(run.results)
    ]


def sort(run: ScoringRun, sort_by: SortBy) -> None:
    """Rank the candidates of a run by likelihood or by specificity."""
    run.results = [replace(one, sort_by=sort_by) for one in run.results]


def rescore(run: ScoringRun, top: int, score_more: ScoreMore) -> None:
    """Score the best candidates of every target again by the arm `full`.

    Their specificity compares the exact likelihood with the same background as before.

    Args:
        run: the scores, which are changed; candidates that failed are added to its failures.
        top: number of candidates per target.
        score_more: scores them.
    """
    chosen = [replace(one.candidates[i], target=one.target.id) for one in run.results for i in one.ranking()[:top]]
    again = score_more([one.target for one in run.results], chosen, ["full"])
    run.failed += again.failed
    by_target = {one.target.id: one for one in again.results}
    run.results = [_rescored(one, by_target.get(one.target.id), top) for one in run.results]


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


def equal_targets(targets: Sequence[ProteinRecord]) -> dict[str, str]:
    """Identifiers of targets that have the residues of an earlier one, and the identifier of that."""
    first: dict[str, str] = {}
    ids = {one.id: first.setdefault(one.sequence, one.id) for one in targets}
    return {own: other for own, other in ids.items() if own != other}


def _rescored(result: TargetResult, again: TargetResult | None, top: int) -> TargetResult:
    exact = {} if again is None else {one.candidate: one for one in again.scores["full"].scores}
    own = result.scores[result.reference].scores
    return replace(
        result,
        rescored={
            index: replace(exact[own[index].candidate], background=own[index].background)
            for index in result.ranking()[:top]
            if own[index].candidate in exact
        },
    )
