"""Scores of candidates on one target or on many, in batches that do not end where a target does (`row_engine`)."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import Sequences, as_list, items_of
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.checks import check_choice, check_count
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.forwards import resolve_arm
from esm_turbo.tasks.common.options import Arm, Background, CandidateFill, SortBy, UnknownResidues
from esm_turbo.tasks.common.pieces import Runner, packed
from esm_turbo.tasks.common.progress import Progress, part_of
from esm_turbo.tasks.common.same_model import call_on
from esm_turbo.tasks.common.scoring_task import ManyScores, ScoringTask, score_item, score_items
from esm_turbo.tasks.scoring.matrix import ScoreMatrix
from esm_turbo.tasks.scoring.score import (
    Scores,
    TargetRows,
    cached_target,
    check_candidates,
    chosen_again,
    compared,
    target_ids,
    warn_of_peptides,
)
from esm_turbo.tasks.scoring.specificity import NO_TARGET, are_compared, background_contexts

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class TargetPairs(NamedTuple):
    """A target with the candidates that are scored on it, all as residues, and a cache of it, if there is one."""

    sequence: str
    candidates: Sequence[str]
    cache: TurboKVCache | None = None


class PairScores(ManyScores[Scores]):
    """Scores on many targets.

    Attributes:
        scores: one entry per target, in their order; None for one that failed.
        failed: by index of the target, why it could not be scored.
    """

    noun, scored_noun = "target", "pair"

    def matrix(self, by: SortBy | None = None) -> ScoreMatrix:
        """Likelihoods or specificities, see `ScoreMatrix.of`; targets are named by their index."""
        return ScoreMatrix.of([(str(i), one) for i, one in enumerate(self.scores) if one is not None], by=by)


@dataclass(frozen=True)
class ScoreTask(ScoringTask[TargetPairs, Scores]):
    """Scores candidates on targets.

    Attributes:
        place: contents of the candidate's positions while a context is computed.
        unknown_residues: whether B, X and Z of candidates are left out of their figures.
    """

    place: CandidateFill = "masked"
    unknown_residues: UnknownResidues = "omit"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("place", self.place, get_args(CandidateFill))
        check_choice("unknown_residues", self.unknown_residues, get_args(UnknownResidues))

    def rows(self, turbo: ContextModel, item: TargetPairs, arm: Arm) -> TargetRows:
        """See `ScoringTask.rows`."""
        target = target_ids(turbo.codes, item.sequence) if item.cache is None else item.cache
        candidates = [turbo.codes.encode(one, "a candidate") for one in item.candidates]
        return TargetRows(turbo, target, candidates, arm, self.place, self.refresh, self.unknown_residues)

    def tokens(self, item: TargetPairs) -> int:
        """See `ScoringTask.tokens`."""
        return sum(self._sizes(item, list(map(len, item.candidates))))

    def _sizes(self, item: TargetPairs, lengths: Sequence[int]) -> list[int]:
        """Tokens that run for candidates of these lengths, each with the context that it is the first to read.

        Each residue of a candidate is masked in turn.
        """
        residues = len(item.sequence)
        again = residues if "full" in self.arms else min(self.refresh, residues)
        places = [length if self.place == "masked" else 0 for length in lengths]
        unread = set() if self.arms == ("full",) or item.cache is not None else set(places)
        sizes = []
        for length, place in zip(lengths, places, strict=True):
            sizes.append(length * (again + length + 1) + (residues + place) * (place in unread))
            unread.discard(place)
        return sizes

    def parts(self, item: TargetPairs, limit: int) -> list[tuple[TargetPairs, Sequence[int]]]:
        """See `ScoringTask.parts`; the shortest candidates come first."""
        given = item.candidates
        shortest_first = sorted(range(len(given)), key=lambda number: len(given[number]))
        sizes = self._sizes(item, [len(given[number]) for number in shortest_first])
        parts = (sorted(own) for own in packed(shortest_first, sizes, limit))
        return [(item._replace(candidates=tuple(given[number] for number in own)), own) for own in parts]

    def units(self, item: TargetPairs) -> int:
        """Residues of all candidates."""
        return sum(map(len, item.candidates))

    def scores_from_dict(self, item: TargetPairs, values: Mapping[str, Any]) -> Scores:
        """See `ScoringTask.scores_from_dict`."""
        return Scores.from_dict(values)


def score(
    turbo: ContextModel,
    context: str | ProteinRecord | TurboKVCache,
    candidates: Sequences,
    *,
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    place: CandidateFill | None = None,
    toks_per_batch: int | None = None,
    unknown_residues: UnknownResidues = "omit",
    background: Background | Sequence[str] = "none",
    rescore: int = 0,
    sort_by: SortBy = "likelihood",
    store: ReadableSource | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score candidates as continuations of a target, each residue masked in turn.

    Args:
        context: residues of the target; or a cache of one row without `<eos>`, from `turbo.prefill` or a store.
        candidates: residues of each candidate, of any lengths.
        arm: `full` runs target and candidate again for every mask; `frozen` extends a context kept at full precision;
            `turbo` extends one stored under the model's preset. A cache fixes its own arm; else the default is
            `turbo`, or `frozen` if the model has no calibration.
        refresh: number of residues at the end of the target that run again with every candidate, their cached keys
            and values dropped. More is closer to `full`, and slower.
        place: contents of the candidate's positions while the context is computed. `masked`, the default, computes
            one context per candidate length; `empty` computes the target alone, once. A cache is used as it is:
            `empty`.
        toks_per_batch: tokens per batch, which bounds the memory; None chooses by arm and device.
        unknown_residues: `omit` leaves B, X and Z of candidates out of their figures; `score` takes them as they are.
        background: contexts in which candidates are scored, too, for their specificity: `alone`, without a target;
            `decoys` or `all-decoys`, the twelve shipped proteins; or residues of other proteins. Each costs as much
            as the target.
        rescore: number of candidates, the best by `sort_by`, that are scored again exactly, by the arm `full`; where
            specificity ranks, in the whole background, too.
        sort_by: `likelihood` or `specificity`, see `Scores.ranking`.
        store: a `ContextStore`, whose contexts are used and to which missing ones are added.
        progress: called with stage `score`, and then `rescore`, and residues, see `Progress`.

    Raises:
        ValueError: the target or a candidate is empty or has a letter that is not a residue, an option is invalid, or
            the cache is empty, has several rows, belongs to another model, or is no whole target that `rescore` could
            compute.
        NotEnoughMemoryError: the target needs more memory than is free; the message says how much.
    """
    if background == "targets":
        raise ValueError("`background` 'targets' needs several targets: see `score_pairs`")
    cache = context if isinstance(context, TurboKVCache) else None
    if cache is not None and place not in (None, "empty"):
        raise ValueError(f"a cache was computed without candidates: `place` must be 'empty', got {place!r}")
    arm, _ = resolve_arm(turbo, arm, cache)
    task = ScoreTask(
        (arm,), refresh, toks_per_batch, store, place or ("masked" if cache is None else "empty"), unknown_residues
    )
    own = as_list(candidates, "candidate")
    check_candidates(turbo.codes, own, task.unknown_residues)
    if isinstance(context, TurboKVCache):
        # As it is now: `progress` may change the caller's.
        context = copy.copy(context)
        ids = cached_target(turbo.codes, context)
        is_whole = ids[0] == turbo.codes.cls and context.positions is None
        if rescore and not is_whole:
            raise ValueError("`rescore` computes a whole target again, and the cache does not hold one from <cls> on")
        pair = TargetPairs(turbo.codes.decode(token for token in ids if token != turbo.codes.cls), own, context)
    else:
        [sequence] = as_list([context], "target")
        pair = TargetPairs(sequence, own)
    with call_on(turbo, progress):
        return _ranked(turbo, task, [pair], background, rescore, sort_by, progress, alone=True)[0]


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
    rescore: int = 0,
    sort_by: SortBy = "likelihood",
    store: ReadableSource | None = None,
    progress: Progress | None = None,
    devices: str | Sequence[str] | Runner | None = None,
) -> PairScores:
    """Score candidates on many targets: as `score` on each, up to rounding, in batches filled across targets.

    Args:
        targets: residues of each. One that is invalid or does not fit into memory fails, and the others are scored.
        candidates: residues of each, scored on all targets; or as many lists of them as there are targets.
        background: contexts with which candidates are compared for their specificity: `targets`, all other targets of
            the same candidate, which costs nothing; `none`; or as for `score`, where `decoys` are one for every four
            targets of a candidate, and all for fewer than four.
        progress: called with stage `score` and residues of all pairs, see `Progress`.
        devices: where copies of the model share the work, in processes of their own: "all" CUDA devices, a list of
            names such as `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`, or `Workers` that run already. Scripts then
            need `if __name__ == "__main__":`. None is this process.

    `arm`, `refresh`, `place`, `toks_per_batch`, `unknown_residues`, `rescore`, `sort_by` and `store` are those of
    `score`. A target that `rescore` has no memory for is named in a warning.

    Raises:
        ValueError: a candidate is empty or has a letter that is not a residue, there are no targets, no candidates or
            not as many lists as targets, or an option is invalid.
    """
    arm, _ = resolve_arm(turbo, arm)
    task = ScoreTask((arm,), refresh, toks_per_batch, store, place, unknown_residues)
    pairs = _pairs(as_list(targets, "target"), candidates)
    for number, one in enumerate(pairs):
        check_candidates(turbo.codes, one.candidates, unknown_residues, f" of target {number}")
    with call_on(turbo, progress):
        return _ranked(turbo, task, pairs, background, rescore, sort_by, progress, turbo.runner(devices))


def _ranked(
    turbo: ContextModel,
    task: ScoreTask,
    pairs: Sequence[TargetPairs],
    background: Background | Sequence[str],
    rescore: int,
    sort_by: SortBy,
    progress: Progress | None,
    runner: Runner | None = None,
    *,
    alone: bool = False,
) -> PairScores:
    """Score pairs, compare them with a background, and score the best again by the arm `full`.

    The background is scored again, too, where that ranks. The options and errors are those of `score_pairs`.

    Args:
        alone: there is one target, whose error is raised.
    """
    [arm] = task.arms
    check_ranking(arm, rescore, sort_by, background)
    warn_of_pairs(turbo, pairs, stacklevel=3)
    if sort_by == "specificity" and background == "targets" and not are_compared(_on_valid_targets(turbo, pairs)):
        raise ValueError(
            "no candidate has several targets, so that none is compared with anything: give a `background`"
        )
    distinct = len(set(_on_valid_targets(turbo, pairs)))
    name, contexts = background_contexts(background, distinct // len(_unique(pairs)))
    found = _compared(turbo, task, pairs, name, contexts, progress, runner, alone=alone)
    found = PairScores(tuple(one and replace(one, sort_by=sort_by) for one in found.scores), found.failed)
    known = {index: one for index, one in enumerate(found.scores) if one is not None}
    if not rescore or not known:
        return found
    chosen = chosen_again(list(known.values()), rescore, name)
    again = [
        TargetPairs(pairs[index].sequence, [one.scores[number].candidate for number in own])
        for (index, one), own in zip(known.items(), chosen, strict=True)
    ]
    if sort_by == "likelihood":
        name, contexts = None, []
    shown = part_of(progress, stage="rescore")
    exact = _compared(turbo, replace(task, arms=("full",)), again, name, contexts, shown, runner, alone=alone)
    if exact.failed:
        reasons = "; ".join(f"target {list(known)[number]}: {error}" for number, error in exact.failed.items())
        warnings.warn(f"not scored again: {reasons}", stacklevel=3)
    scores = list(found.scores)
    for (index, one), own in zip(known.items(), exact.scores, strict=True):
        scores[index] = one.with_exact(one.ranking()[:rescore], own)
    return PairScores(tuple(scores), found.failed)


def _compared(
    turbo: ContextModel,
    task: ScoreTask,
    pairs: Sequence[TargetPairs],
    background: str | None,
    contexts: Sequence[ProteinRecord],
    progress: Progress | None,
    runner: Runner | None,
    *,
    alone: bool = False,
) -> PairScores:
    """Score pairs, and the same candidates in the contexts of a background, see `_ranked`."""
    others = [TargetPairs(record.sequence, _unique(pairs)) for record in contexts]
    size, more = (sum(map(task.units, own)) for own in (pairs, others))

    def score_all(own: Sequence[TargetPairs], start: int) -> PairScores:
        shown = part_of(progress, start=start, total=size + more)
        if own is pairs and alone:
            return PairScores((score_item(turbo, task, own[0], shown),), {})
        return PairScores.of(score_items(turbo, task, own, in_pieces=runner is not None, progress=shown, runner=runner))

    found = score_all(pairs, 0)
    if background is None:
        return found
    elsewhere = None
    if others:
        rest = score_all(others, size)
        elsewhere = [(_residues(turbo, one.sequence), rest[index]) for index, one in enumerate(others)]
    known = [index for index, one in enumerate(found.scores) if one is not None]
    targets = [_residues(turbo, pairs[index].sequence) for index in known]
    own = compared(targets, [found[index] for index in known], background, elsewhere)
    scores = list(found.scores)
    if any(one.background is not None for target in own for one in target.scores):
        for index, one in zip(known, own, strict=True):
            scores[index] = one
    return PairScores(tuple(scores), found.failed)


def _residues(turbo: ContextModel, target: str) -> str:
    """Those of a valid target; however it is written, a protein is no background of itself."""
    return target if target == NO_TARGET else turbo.codes.decode(turbo.codes.encode(target, "the target"))


def _on_valid_targets(turbo: ContextModel, pairs: Sequence[TargetPairs]) -> Iterator[tuple[str, str]]:
    """Each candidate with the residues of each of its targets; targets that are invalid fail by themselves."""
    for pair in pairs:
        with contextlib.suppress(ValueError):
            residues = _residues(turbo, pair.sequence)
            yield from ((candidate, residues) for candidate in _unique([pair]))


def _unique(pairs: Sequence[TargetPairs]) -> list[str]:
    """All candidates of pairs, each once."""
    return list(dict.fromkeys(one.upper() for pair in pairs for one in pair.candidates))


def check_ranking(arm: Arm | None, rescore: int, sort_by: SortBy, background: str | Sequence[str]) -> None:
    """Check how candidates are ranked and scored again; the options are those of `score`.

    Raises:
        ValueError: specificity has no background, or the arm `full` has scored all.
    """
    check_count("rescore", rescore, 0)
    if check_choice("sort_by", sort_by, get_args(SortBy)) == "specificity" and background == "none":
        raise ValueError("`sort_by` 'specificity' needs a `background`, such as 'decoys'")
    if rescore and arm == "full":
        raise ValueError("`rescore` scores the best again by the arm 'full', but that scores all; give one of the two")


def warn_of_pairs(turbo: ContextModel, pairs: Sequence[TargetPairs], stacklevel: int = 2) -> None:
    """Warn of targets with candidates that are longer than the model was trained on, or that it was not trained on."""
    lengths = (len(one.sequence) + max(map(len, one.candidates)) for one in pairs)
    warn_if_long(lengths, turbo.model.family, stacklevel=stacklevel + 1)
    warn_of_peptides(turbo, stacklevel=stacklevel + 2)


def _pairs(targets: Sequence[str], candidates: Sequence[str] | Sequence[Sequence[str]]) -> list[TargetPairs]:
    given = [candidates] if isinstance(candidates, str) else items_of(candidates, "candidate")
    if all(isinstance(one, str) for one in given):
        shared = as_list([str(one) for one in given], "candidate")
        return [TargetPairs(target, shared) for target in targets]
    if len(given) != len(targets):
        raise ValueError(
            f"`candidates` must be residues, or one list of them per target ({len(targets)}), got {len(given)} lists"
        )
    lists = [[own] if isinstance(own, str) else items_of(own, "candidate") for own in given]
    for number, own in enumerate(lists):
        if not own:
            raise ValueError(f"`candidates` must hold at least one candidate of each target, target {number} has none")
    return [TargetPairs(target, as_list(own, "candidate")) for target, own in zip(targets, lists, strict=True)]
