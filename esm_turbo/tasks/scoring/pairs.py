"""Scores of candidates on many targets, in batches that do not end where a target does (`tasks.common.waves`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import as_list
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.ahead import Ahead
from esm_turbo.tasks.common.arms import ReadableSource, batch_tokens, check_store, resolve_arm
from esm_turbo.tasks.common.checks import check_choice, check_count
from esm_turbo.tasks.common.memory import failure_reason
from esm_turbo.tasks.common.options import Arm, Background, CandidateFill
from esm_turbo.tasks.common.progress import Progress, StageProgress, part_of
from esm_turbo.tasks.common.waves import Extensions, Rows, merge_errors, predict_rows
from esm_turbo.tasks.scoring.score import (
    CandidateScore,
    Scores,
    encode_candidates,
    masked_rows,
    score,
    target_ids,
    warn_of_peptides,
)
from esm_turbo.tasks.scoring.specificity import background_contexts, figures_in, figures_on_others

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class TargetPairs(NamedTuple):
    """A target with the candidates that are scored on it."""

    target: str
    candidates: Sequence[str]


@dataclass(frozen=True)
class PairScores(Tabular):
    """Scores on many targets.

    Attributes:
        scores: one entry per target, in their order; None for one that failed.
        failed: by index of the target, why it could not be scored.
    """

    scores: tuple[Scores | None, ...]
    failed: Mapping[int, str]

    def __repr__(self) -> str:
        pairs = sum(len(one.scores) for one in self.scores if one is not None)
        return named(self, counted(len(self.scores), "target"), counted(pairs, "pair"), f"{len(self.failed):,} failed")

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int) -> Scores:
        """Scores on a target.

        Raises:
            ValueError: it could not be scored.
        """
        found = self.scores[index]
        if found is None:
            raise ValueError(f"target {index} was not scored: {self.failed[index % len(self)]}")
        return found

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        scored = (one.columns() for one in self.scores if one is not None)
        return ["target", *next(scored, [])]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per target, by its index, and candidate, its rank on this target and figures."""
        for index, one in enumerate(self.scores):
            for row in () if one is None else one.rows():
                yield index, *row


def score_pairs(
    turbo: ContextModel,
    targets: Sequence[str],
    candidates: Sequence[str] | Sequence[Sequence[str]],
    *,
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    place: CandidateFill = "masked",
    toks_per_batch: int | None = None,
    background: Background | Sequence[str] = "targets",
    store: ReadableSource | None = None,
    progress: Progress | None = None,
) -> PairScores:
    """Score candidates on many targets: as `score` on each, up to rounding, in batches filled across targets.

    Args:
        targets: residues of each. One that is invalid or does not fit into memory fails, and the others are scored.
        candidates: residues of each, scored on all targets; or as many lists of them as there are targets.
        background: contexts with which candidates are compared for their specificity: `targets`, all other targets of
            the same candidate, which costs nothing; `none`; or as for `score.score`.
        progress: called with stage `score` and residues of all pairs, see `Progress`.

    `arm`, `refresh`, `place`, `toks_per_batch` and `store` are those of `score.score`.

    Raises:
        ValueError: a candidate is empty or has a letter that is not a residue, there are no targets, no candidates or
            not as many lists as targets, or an option is invalid.
    """
    pairs = checked_pairs(turbo, targets, candidates)
    given: dict[str, Any] = {
        "arm": arm,
        "refresh": refresh,
        "place": place,
        "toks_per_batch": toks_per_batch,
        "store": store,
    }

    def score_all(pairs: Sequence[TargetPairs], progress: Progress | None) -> PairScores:
        found = dict(iter_scores(turbo, pairs, progress=progress, **given))
        device = turbo.model.device
        failed = {
            i: failure_reason(pairs[i].target, one, device) for i, one in found.items() if isinstance(one, Exception)
        }
        scores = (found[i] for i in range(len(pairs)))
        return PairScores(tuple(one if isinstance(one, Scores) else None for one in scores), failed)

    return score_against(pairs, background, score_all, progress)


def score_against(
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
        known = figures_on_others([(pairs[i].target.upper(), found[i].by_candidate()) for i in indices])
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
    return replace(found, scores=tuple(scores))


def checked_pairs(
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


def iter_scores(
    turbo: ContextModel,
    pairs: Sequence[TargetPairs],
    *,
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    place: CandidateFill = "masked",
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    progress: Progress | None = None,
    ahead: Ahead | None = None,
) -> Iterator[tuple[int, Scores | Exception]]:
    """Score candidates on many targets, and yield the scores target by target.

    Args:
        pairs: targets with candidates, which must be valid.
        ahead: see `waves.predict_rows`.

    `score_pairs` has the other arguments.

    Yields:
        For each target, in order, its index and scores, or the ValueError or lack of memory that it
        failed with.

    Raises:
        ValueError: an option is invalid.
    """
    check_store(store)
    check_count("refresh", refresh, 0)
    arm, preset = resolve_arm(turbo, arm)
    check_choice("place", place, get_args(CandidateFill))
    tokens = batch_tokens(toks_per_batch, arm, turbo.model.device)
    counter = StageProgress(progress, "score", sum(len(c) for one in pairs for c in one.candidates))
    if arm == "full":
        return _recomputed(turbo, pairs, tokens, counter)
    warn_if_long((len(one.target) + max(map(len, one.candidates)) for one in pairs), turbo.model.family, stacklevel=3)
    warn_of_peptides(turbo)
    task = _CachedTargets(turbo, pairs, arm, preset, refresh, place)
    return task.scores(tokens, store, counter, ahead)


def _recomputed(
    turbo: ContextModel, pairs: Sequence[TargetPairs], tokens: int, counter: StageProgress
) -> Iterator[tuple[int, Scores | Exception]]:
    """One target after the other: every row holds a whole target, so that there is nothing to share."""
    for index, one in enumerate(pairs):
        try:
            scores = score(
                turbo, one.target, one.candidates, arm="full", toks_per_batch=tokens, progress=counter.part()
            )
        except Exception as error:
            if not (isinstance(error, ValueError) or is_out_of_memory(error)):
                raise
            yield index, error.with_traceback(None)
        else:
            yield index, scores


class _CachedTargets:
    """The targets of a run, as rows that extend their contexts."""

    def __init__(
        self,
        turbo: ContextModel,
        pairs: Sequence[TargetPairs],
        arm: Arm,
        preset: str | None,
        refresh: int,
        place: CandidateFill,
    ) -> None:
        self.turbo, self.pairs = turbo, pairs
        self.arm, self.preset, self.place = arm, preset, place
        self.refresh = refresh
        self.refreshed: dict[int, int] = {}
        self.invalid: dict[int, ValueError] = {}

    def scores(
        self, tokens: int, store: ReadableSource | None, counter: StageProgress, ahead: Ahead | None
    ) -> Iterator[tuple[int, Scores | Exception]]:
        predicted = predict_rows(
            self.turbo, self._jobs(), self.arm, tokens, store=store, advance=counter.advance, ahead=ahead
        )
        scored = (
            (index, values if isinstance(values, Exception) else self._scores(index, values))
            for index, values in predicted
        )
        return merge_errors(scored, self.invalid, len(self.pairs))

    def _jobs(self) -> Iterator[Rows]:
        codes = self.turbo.codes
        for index, (target, candidates) in enumerate(self.pairs):
            try:
                token_ids = target_ids(codes, target)
            except ValueError as error:
                self.invalid[index] = error
                continue
            self.refreshed[index] = min(self.refresh, len(token_ids))
            kept = len(token_ids) - self.refreshed[index]
            for length, group in _by_length(codes.encode(one, "a candidate") for one in candidates):
                after = [*[codes.mask] * length, codes.eos] if self.place == "masked" else []
                yield Rows(
                    index,
                    (codes.cls, *token_ids, *after),
                    1 + kept,
                    count=len(group) * length,
                    width=len(token_ids) - kept + length + 1,
                    make=self._maker(token_ids[kept:], group),
                )

    def _maker(self, prefix: list[int], candidates: list[list[int]]) -> Callable[[Tensor], Extensions]:
        def make(copies: Tensor) -> Extensions:
            input_ids, at, _ = masked_rows(self.turbo.codes, prefix, torch.tensor(candidates), copies)
            return Extensions(input_ids, at)

        return make

    def _scores(self, index: int, predicted: Sequence[Tensor]) -> Scores:
        """Scores from the log-probabilities of each group of candidates of one length."""
        codes = self.turbo.codes
        residues = [codes.encode(one, "a candidate") for one in self.pairs[index].candidates]
        found: dict[int, list[tuple[float, ...]]] = {}
        for (length, group), values in zip(_by_length(residues), predicted, strict=True):
            own = values.gather(1, torch.tensor(group).reshape(-1, 1)).reshape(-1, length)
            found[length] = [tuple(row) for row in own.tolist()]
        left = {length: iter(rows) for length, rows in found.items()}
        scores = tuple(CandidateScore(codes.decode(ids), next(left[len(ids)])) for ids in residues)
        return Scores(scores, self.arm, self.preset, self.place, self.refreshed.pop(index), self.turbo.name)


def _by_length(candidates: Iterable[list[int]]) -> list[tuple[int, list[list[int]]]]:
    """Candidates by their number of residues, from the fewest on; those of one length keep their order."""
    return [(length, list(own)) for length, own in groupby(sorted(candidates, key=len), key=len)]
