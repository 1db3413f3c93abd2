"""Scores of candidates on many targets, in batches that do not end where a target does (`tasks.common.row_engine`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import as_list
from esm_turbo.files.tabular import counted, named
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.checks import check_choice
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.forwards import resolve_arm
from esm_turbo.tasks.common.options import Arm, Background, CandidateFill, SortBy, UnknownResidues
from esm_turbo.tasks.common.pieces import Runner
from esm_turbo.tasks.common.progress import Progress, part_of
from esm_turbo.tasks.common.scoring_task import ManyScores, ScoringTask, score_items
from esm_turbo.tasks.scoring.matrix import ScoreMatrix
from esm_turbo.tasks.scoring.score import (
    Scores,
    TargetRows,
    check_known,
    encode_candidates,
    target_ids,
    warn_of_peptides,
)
from esm_turbo.tasks.scoring.specificity import background_contexts, figures_in, figures_on_others

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class TargetPairs(NamedTuple):
    """A target with the candidates that are scored on it, all as residues."""

    sequence: str
    candidates: Sequence[str]


class PairScores(ManyScores[Scores]):
    """Scores on many targets.

    Attributes:
        scores: one entry per target, in their order; None for one that failed.
        failed: by index of the target, why it could not be scored.
    """

    noun = "target"

    def __repr__(self) -> str:
        pairs = sum(len(one.scores) for one in self.scores if one is not None)
        return named(self, counted(len(self.scores), "target"), counted(pairs, "pair"), f"{len(self.failed):,} failed")

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        scored = (one.columns() for one in self.scores if one is not None)
        return ["target", *next(scored, [])]

    def matrix(self, by: SortBy | None = None) -> ScoreMatrix:
        """Likelihoods or specificities, see `ScoreMatrix.of`; targets are named by their index."""
        return ScoreMatrix.of([(str(i), one) for i, one in enumerate(self.scores) if one is not None], by=by)


@dataclass(frozen=True)
class ScoreTask(ScoringTask[TargetPairs, Scores]):
    """Scores candidates on targets.

    Attributes:
        place: contents of the candidate's positions while a context is computed.
    """

    place: CandidateFill

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("place", self.place, get_args(CandidateFill))

    def rows(self, turbo: ContextModel, item: TargetPairs, arm: Arm) -> TargetRows:
        """See `ScoringTask.rows`."""
        candidates = [turbo.codes.encode(one, "a candidate") for one in item.candidates]
        return TargetRows(turbo, target_ids(turbo.codes, item.sequence), candidates, arm, self.place, self.refresh)

    def tokens(self, item: TargetPairs) -> int:
        """See `ScoringTask.tokens`."""
        return sum(self.tokens_of(len(item.sequence), len(one)) for one in item.candidates)

    def tokens_of(self, target: int, length: int) -> int:
        """Tokens that run to score a candidate of `length` residues, each of which is masked in turn.

        Args:
            target: number of residues of its target.
        """
        again = target if "full" in self.arms else min(self.refresh, target)
        return length * (again + length + 1)

    def units(self, item: TargetPairs) -> int:
        """Residues of all candidates."""
        return sum(map(len, item.candidates))

    def options(self) -> list[Any]:
        """See `ScoringTask.options`."""
        return [self.refresh, self.place, self.toks_per_batch]

    def scores_from_dict(self, item: TargetPairs, values: Mapping[str, Any]) -> Scores:
        """See `ScoringTask.scores_from_dict`."""
        return Scores.from_dict(values)


def score_pairs(
    turbo: ContextModel,
    targets: Sequence[str],
    candidates: Sequence[str] | Sequence[Sequence[str]],
    *,
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    place: CandidateFill = "masked",
    toks_per_batch: int | None = None,
    unknown_residues: UnknownResidues = "omit",
    background: Background | Sequence[str] = "targets",
    store: ReadableSource | None = None,
    progress: Progress | None = None,
    devices: str | Sequence[str] | Runner | None = None,
) -> PairScores:
    """Score candidates on many targets: as `score` on each, up to rounding, in batches filled across targets.

    Args:
        targets: residues of each. One that is invalid or does not fit into memory fails, and the others are scored.
        candidates: residues of each, scored on all targets; or as many lists of them as there are targets.
        background: contexts with which candidates are compared for their specificity: `targets`, all other targets of
            the same candidate, which costs nothing; `none`; or as for `score.score`.
        progress: called with stage `score` and residues of all pairs, see `Progress`.
        devices: where copies of the model share the work, in processes of their own: "all" CUDA devices, a list of
            names such as `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`, or `Workers` that run already. Scripts then
            need `if __name__ == "__main__":`. None is this process.

    `arm`, `refresh`, `place`, `toks_per_batch`, `unknown_residues` and `store` are those of `score.score`.

    Raises:
        ValueError: a candidate is empty or has a letter that is not a residue, there are no targets, no candidates or
            not as many lists as targets, or an option is invalid.
    """
    check_choice("unknown_residues", unknown_residues, get_args(UnknownResidues))
    pairs = _checked_pairs(turbo, targets, candidates)
    for candidates_of_one in dict.fromkeys(tuple(one.candidates) for one in pairs):
        check_known(candidates_of_one, unknown_residues)
    arm, _ = resolve_arm(turbo, arm)
    task = ScoreTask((arm,), refresh, toks_per_batch, store, place)
    warn_of_pairs(turbo, pairs)
    runner: Runner | None = turbo.runner(devices)

    def score_all(pairs: Sequence[TargetPairs], progress: Progress | None) -> PairScores:
        found = PairScores.of(score_items(turbo, task, pairs, progress=progress, runner=runner))
        scores = (None if one is None else one.with_unknown(unknown_residues) for one in found.scores)
        return PairScores(tuple(scores), found.failed)

    return _score_against(pairs, background, score_all, progress)


def _score_against(
    pairs: Sequence[TargetPairs],
    background: Background | Sequence[str],
    score_all: Callable[[Sequence[TargetPairs], Progress | None], PairScores],
    progress: Progress | None,
) -> PairScores:
    """Score pairs, and the same candidates in a background.

    Args:
        score_all: scores pairs.

    `score_pairs` has the other arguments.

    Raises:
        ValueError: there is no such background, or one of its contexts could not be scored.
    """
    compared, records = background_contexts(background)
    unique = list(dict.fromkeys(one.upper() for pair in pairs for one in pair.candidates)) if records else []
    others = [TargetPairs(record.sequence, unique) for record in records]
    size, more = (sum(len(one) for pair in own for one in pair.candidates) for own in (pairs, others))
    found = score_all(pairs, part_of(progress, total=size + more))
    if compared == "targets":
        indices = [index for index, one in enumerate(found.scores) if one is not None]
        known = figures_on_others([(pairs[i].sequence.upper(), found[i].by_candidate()) for i in indices])
        figures = dict(zip(indices, known, strict=True)) if any(known) else {}
    elif others:
        elsewhere = score_all(others, part_of(progress, start=size, total=size + more))
        shared = figures_in(elsewhere[index].by_candidate() for index in range(len(others)))
        figures = dict.fromkeys(range(len(pairs)), shared)
    else:
        return found
    scores = (
        one.with_background(figures[index], str(compared)) if one is not None and index in figures else one
        for index, one in enumerate(found.scores)
    )
    return PairScores(tuple(scores), found.failed)


def warn_of_pairs(turbo: ContextModel, pairs: Sequence[TargetPairs], stacklevel: int = 2) -> None:
    """Warn of targets with candidates that are longer than the model was trained on, or that it was not trained on."""
    lengths = (len(one.sequence) + max(map(len, one.candidates)) for one in pairs)
    warn_if_long(lengths, turbo.model.family, stacklevel=stacklevel + 1)
    warn_of_peptides(turbo, stacklevel=stacklevel + 2)


def _checked_pairs(
    turbo: ContextModel, targets: Sequence[str], candidates: Sequence[str] | Sequence[Sequence[str]]
) -> list[TargetPairs]:
    """Targets with their candidates; the arguments, and the errors, are those of `score_pairs`."""
    pairs = _pairs(as_list(targets, "target"), candidates)
    for number, one in enumerate(pairs):
        encode_candidates(turbo.codes, one.candidates, f" of target {number}")
    return pairs


def _pairs(targets: Sequence[str], candidates: Sequence[str] | Sequence[Sequence[str]]) -> list[TargetPairs]:
    given = [candidates] if isinstance(candidates, str) else list(candidates)
    if all(isinstance(one, str) for one in given):
        shared = as_list([str(one) for one in given], "candidate")
        return [TargetPairs(target, shared) for target in targets]
    if len(given) != len(targets):
        raise ValueError(
            f"`candidates` must be residues, or one list of them per target ({len(targets)}), got {len(given)} lists"
        )
    lists = [[own] if isinstance(own, str) else list(own) for own in given]
    for number, own in enumerate(lists):
        if not own:
            raise ValueError(f"`candidates` must hold at least one candidate of each target, target {number} has none")
    return [TargetPairs(target, as_list(own, "candidate")) for target, own in zip(targets, lists, strict=True)]
