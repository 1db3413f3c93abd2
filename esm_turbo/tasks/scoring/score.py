"""Pseudo-log-likelihoods of candidates, usually peptides, as continuations of a target.

As in PepMLM (Chen et al. 2024, arXiv:2310.03842), a candidate follows the target in one sequence and each of its
residues is masked in turn. With target T and residues c_1 ... c_m

    pseudo-log-likelihood = sum_i log p(c_i | T, c without c_i),    pseudo-perplexity = exp(-pseudo-log-likelihood / m),

with probabilities over the whole vocabulary. A candidate takes m runs, which differ only in the last m + 1 tokens. So
the target is computed once for all candidates of one length, with masks in their place, and each run extends this one
context by the candidate and `<eos>`. The last `refresh` residues of the target, which depend most on the candidate, run
again with it, and their cached keys and values are dropped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, get_args
from weakref import WeakSet

import torch
from torch import Tensor

from esm_turbo.files.tabular import counted, named
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import CHAIN_BREAK, UNKNOWN, ProteinRecord
from esm_turbo.proteins.limits import UntrainedInputWarning
from esm_turbo.tasks.common.checks import check_choice
from esm_turbo.tasks.common.forwards import arm_preset, single_row
from esm_turbo.tasks.common.options import DEFAULT_TOP_K, Arm, CandidateFill, SortBy, UnknownResidues
from esm_turbo.tasks.common.rankings import RankAgreement, lowest_first, rank_agreement
from esm_turbo.tasks.common.rows import ItemRows, RowBatch, RowGroup
from esm_turbo.tasks.common.scoring_task import ItemScores
from esm_turbo.tasks.scoring.specificity import (
    NO_TARGET,
    BackgroundFigures,
    figures_elsewhere,
    figures_in,
    figures_on_others,
)

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.proteins.tokens import TokenCodes


_COLUMNS = ["sequence", "rank", "pseudo_perplexity", "pseudo_log_likelihood", "mean_log_probability"]
SPECIFICITY_COLUMNS = ("specificity", "specificity_z")
_FIELDS = ("model", "arm", "preset", "place", "refresh")


@dataclass(frozen=True)
class CandidateScore:
    """The score of one candidate.

    Attributes:
        candidate: its residues.
        log_probabilities: log-probability of each residue while it was masked, natural logarithms; also of a break
            between chains, which no figure is of.
        background: its figures in other contexts; None if there are none.
        unknown_residues: whether all figures leave out the residues B, X and Z.
    """

    candidate: str
    log_probabilities: tuple[float, ...]
    background: BackgroundFigures | None = None
    unknown_residues: UnknownResidues = "omit"

    def __repr__(self) -> str:
        names = ("pseudo_perplexity", "pseudo_log_likelihood", "specificity")
        known = {name: getattr(self, name) for name in names}
        return named(self, repr(self.candidate), **{n: None if x is None else round(x, 4) for n, x in known.items()})

    @property
    def scored(self) -> int:
        """Number of residues that the figures are of."""
        return scored_residues(self.candidate, self.unknown_residues)

    @property
    def pseudo_log_likelihood(self) -> float:
        """Sum over the residues, nats."""
        if self.scored == len(self.candidate):
            return math.fsum(self.log_probabilities)
        pairs = zip(self.candidate, self.log_probabilities, strict=True)
        without = left_out(self.unknown_residues)
        return math.fsum(value for letter, value in pairs if letter not in without)

    @property
    def mean_log_probability(self) -> float:
        """Mean over the residues, nats; higher is more likely. NaN if none is known."""
        return self.pseudo_log_likelihood / self.scored if self.scored else math.nan

    @property
    def pseudo_perplexity(self) -> float:
        """At least 1; lower is more likely. Independent of length."""
        try:
            return math.exp(-self.mean_log_probability)
        except OverflowError:
            return math.inf

    @property
    def specificity(self) -> float | None:
        """`mean_log_probability` minus the mean of the background, nats per residue; None without a background."""
        return None if self.background is None else self.mean_log_probability - self.background.mean

    @property
    def specificity_z(self) -> float | None:
        """`specificity` in standard deviations of the background; None of fewer than 5 contexts, or of equal ones."""
        difference = self.specificity
        return None if self.background is None or difference is None else self.background.in_spreads(difference)

    def is_finite(self) -> bool:
        """Whether no residue's probability is NaN or zero, and at least one is scored."""
        return all(map(math.isfinite, self.log_probabilities)) and self.scored > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        figures: dict[str, Any] = {
            "sequence": self.candidate,
            "pseudo_log_likelihood": self.pseudo_log_likelihood,
            "pseudo_perplexity": self.pseudo_perplexity,
            "log_probabilities": list(self.log_probabilities),
        }
        if self.background is not None:
            figures |= {name: getattr(self, name) for name in SPECIFICITY_COLUMNS}
            figures["background"] = self.background._asdict()
        return figures

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], unknown_residues: UnknownResidues) -> Self:
        """Inverse of `to_dict`."""
        background = BackgroundFigures(**values["background"]) if "background" in values else None
        return cls(values["sequence"], tuple(values["log_probabilities"]), background, unknown_residues)


@dataclass(frozen=True)
class Scores(ItemScores):
    """Scores of candidates on one target.

    Attributes:
        scores: in the order of the candidates.
        arm: `full`, `frozen` or `turbo`.
        preset: storage format of the context; None for `full`.
        place: contents of the candidate's positions while the context was computed; None for `full`.
        refresh: number of target residues that ran again with every candidate; 0 for `full`.
        model: name of the model.
        background: what candidates were compared with: `alone`, `targets`, `decoys`, or None.
        rescored: scores of the best candidates by the arm `full`, by index; None if none were scored again.
        sort_by: what ranks the candidates, `likelihood` or `specificity`.
    """

    scores: tuple[CandidateScore, ...]
    arm: Arm
    preset: str | None
    place: CandidateFill | None
    refresh: int
    model: str
    background: str | None = None
    rescored: Mapping[int, CandidateScore] | None = None
    sort_by: SortBy = "likelihood"

    def __repr__(self) -> str:
        best = [f"best {self.scores[index]!r}" for index in self.ranking()[:1]]
        fields = {name: getattr(self, name) for name in (*_FIELDS, "background")}
        return named(self, counted(len(self.scores), "candidate"), *best, **fields)

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        more = () if self.background is None else SPECIFICITY_COLUMNS
        return [*_COLUMNS, *more, *self.rescored_columns()]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per candidate, in their order, its rank by `sort_by` and figures; None where it has no such figure."""
        ranks = {index: rank for rank, index in enumerate(self.ranking(), start=1)}
        exact = self.rescored_cells()
        for index, one in enumerate(self.scores):
            figures = one.pseudo_perplexity, one.pseudo_log_likelihood, one.mean_log_probability
            more = () if self.background is None else (one.specificity, one.specificity_z)
            yield one.candidate, ranks[index], *figures, *more, *exact[index]

    def rescored_columns(self) -> list[str]:
        """Names of the columns of `rescored_cells`; none if no candidates were to be scored again."""
        if self.rescored is None:
            return []
        compared = () if self.background is None else SPECIFICITY_COLUMNS
        return ["full_pseudo_perplexity", *(f"full_{name}" for name in compared), "full_rank"]

    def rescored_cells(self) -> list[tuple[float | None, ...]]:
        """For each candidate its figures by the arm `full`, and its rank among those scored again; None for others.

        They have a specificity if their background was scored again, too, and are ranked as by `ranking`.
        """
        columns, again = self.rescored_columns(), self.rescored or {}
        exact = replace(self, scores=tuple(again.get(index, one) for index, one in enumerate(self.scores)))
        order = [index for index in exact.ranking() if index in again]
        cells: list[tuple[float | None, ...]] = [(None,) * len(columns)] * len(self.scores)
        for rank, index in enumerate(order, start=1):
            figures = (getattr(again[index], name.removeprefix("full_")) for name in columns[:-1])
            cells[index] = *figures, rank
        return cells

    @property
    def pseudo_perplexities(self) -> list[float]:
        """Pseudo-perplexity of each candidate."""
        return [score.pseudo_perplexity for score in self.scores]

    def ranking(self, by: SortBy | None = None) -> list[int]:
        """Indices of the candidates, best first; equal ones keep their order, and those without a number are last.

        Args:
            by: `likelihood`, lowest pseudo-perplexity first; or `specificity`, highest first, in standard deviations if
                all candidates have it in them, and of those without one as by likelihood. None is `sort_by`.

        Raises:
            ValueError: it is neither, or is `specificity` without a background.
        """
        by_likelihood = lowest_first(self.pseudo_perplexities)
        if check_choice("by", by or self.sort_by, get_args(SortBy)) == "likelihood":
            return by_likelihood
        if by is not None and self.background is None:
            raise ValueError("`by` 'specificity' needs scores with a `background`")
        _, values = self.specificities()
        found = lowest_first([None if (x := values[index]) is None else -x for index in by_likelihood])
        return [by_likelihood[place] for place in found]

    def specificities(self) -> tuple[str | None, list[float | None]]:
        """Their unit, and the specificity of each: `s.d.` if all that have one have it in them, or `nats`."""
        return (None, [None] * len(self.scores)) if self.background is None else specificities(self.scores)

    @property
    def compared_with(self) -> str | None:
        """What the background is, such as `12 decoys`; None without one."""
        return compared_with(self.background, self.scores)

    def by_candidate(self) -> dict[str, float]:
        """Mean log-probability by candidate; of equal ones, which may differ by rounding, the highest."""
        # The highest is the last to be set.
        return dict(sorted(((one.candidate, one.mean_log_probability) for one in self.scores), key=lambda one: one[1]))

    def with_background(self, figures: Mapping[str, BackgroundFigures], background: str) -> Scores:
        """The same scores with figures of a background by candidate; candidates may lack them."""
        scores = tuple(replace(one, background=figures.get(one.candidate)) for one in self.scores)
        return replace(self, scores=scores, background=background)

    def with_exact(self, chosen: Sequence[int], exact: Scores | None) -> Scores:
        """The same scores with those of some candidates by the arm `full`.

        Args:
            chosen: indices of the candidates.
            exact: their scores; those that could not be scored are missing.
        """
        known = {} if exact is None else {one.candidate: one for one in exact.scores}
        again = {index: known.get(self.scores[index].candidate) for index in chosen}
        return replace(self, rescored={index: one for index, one in again.items() if one is not None})

    def ordered(self, order: Sequence[int]) -> Scores:
        """The same scores in another order of the candidates, by their indices."""
        rescored = self.rescored
        if rescored is not None:
            rescored = {place: rescored[index] for place, index in enumerate(order) if index in rescored}
        return replace(self, scores=tuple(self.scores[index] for index in order), rescored=rescored)

    def agreement(self, reference: Scores, top_k: int = DEFAULT_TOP_K) -> RankAgreement:
        """Agreement with another ranking of the same candidates, by log-probability per residue.

        Raises:
            ValueError: the candidates differ, or a score is not finite.
        """
        ours, theirs = ([(c.candidate, c.mean_log_probability) for c in one.scores] for one in (self, reference))
        if [candidate for candidate, _ in ours] != [candidate for candidate, _ in theirs]:
            raise ValueError("only scores of the same candidates in the same order can be compared")
        return rank_agreement([mean for _, mean in ours], [mean for _, mean in theirs], top_k)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            KeyError, TypeError: an entry is missing, or of another type.
        """
        unknown = values.get("unknown_residues", "omit")
        scores = tuple(CandidateScore.from_dict(one, unknown) for one in values["candidates"])
        fields = {name: values[name] for name in _FIELDS} | {"background": values.get("background")}
        fields["sort_by"] = values.get("sort_by", "likelihood")
        if "rescored" in values:
            fields["rescored"] = {one["index"]: CandidateScore.from_dict(one, unknown) for one in values["rescored"]}
        return cls(scores, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {name: getattr(self, name) for name in (*_FIELDS, "background", "sort_by")}
        values["unknown_residues"] = next((one.unknown_residues for one in self.scores), "omit")
        values["candidates"] = [one.to_dict() for one in self.scores]
        if self.rescored is not None:
            values["rescored"] = [{"index": index} | one.to_dict() for index, one in self.rescored.items()]
        return values


@dataclass(frozen=True, kw_only=True)
class CandidateRows(RowGroup):
    """Candidates of one length, each with one residue masked in turn.

    Attributes:
        codes: token ids of the model's tokenizer.
        prefix: tokens that run before each candidate: the refreshed residues of the target, or all of it.
        candidates: token ids, int64 [k, m].
        positions: of the tokens of each row, int64 [width]; None for those after the context.
    """

    codes: TokenCodes
    prefix: Sequence[int]
    candidates: Tensor
    positions: Tensor | None = None

    def rows(self, numbers: Tensor) -> RowBatch:
        """Row `r` masks residue `r % m` of candidate `r // m`."""
        count, length = len(numbers), self.candidates.shape[1]
        at = numbers % length
        masked = self.candidates[numbers // length].scatter(1, at[:, None], self.codes.mask)
        before, eos = torch.tensor(list(self.prefix), dtype=torch.int64), torch.tensor([self.codes.eos])
        input_ids = torch.cat([before.expand(count, -1), masked, eos.expand(count, 1)], dim=1)
        positions = None if self.positions is None else self.positions.expand(count, -1)
        return RowBatch(input_ids, len(self.prefix) + at, position_ids=positions)

    def reduce(self, numbers: Tensor, log_probs: Tensor) -> Tensor:
        """Log-probabilities of the masked residues, float32 [n]."""
        return log_probs.gather(1, self.candidates.flatten()[numbers, None])[:, 0]


class TargetRows(ItemRows[Scores]):
    """A target with candidates.

    Args:
        turbo: the model.
        target: token ids of its residues; or a cache of one row without `<eos>`, which is not changed.
        candidates: token ids of each.
        arm: `full`, `frozen` or `turbo`.
        place: contents of the candidate's positions while the context is computed.
        refresh: number of residues at the end of the target that run again with each candidate; at most all do.
        unknown_residues: see `CandidateScore`.

    Attributes:
        groups: candidates by their length, the shortest first.

    Raises:
        ValueError: the cache has several rows, no residues, or an `<eos>`.
    """

    groups: list[CandidateRows]

    def __init__(
        self,
        turbo: ContextModel,
        target: Sequence[int] | TurboKVCache,
        candidates: Sequence[Sequence[int]],
        arm: Arm,
        place: CandidateFill,
        refresh: int,
        unknown_residues: UnknownResidues = "omit",
    ) -> None:
        self.turbo, self.arm, self.candidates, self.unknown_residues = turbo, arm, candidates, unknown_residues
        self.place: CandidateFill | None = None if arm == "full" else place
        codes = turbo.codes
        if isinstance(target, TurboKVCache):
            ids = cached_target(codes, target)
            self.residues = len(ids) - ids.count(codes.cls)
        else:
            ids, self.residues = [codes.cls, *target], len(target)
        self.refresh = 0 if arm == "full" else min(refresh, self.residues)
        kept = 0 if arm == "full" else len(ids) - self.refresh
        prefix, context, after = ids[kept:], None, list[int]()
        if isinstance(target, TurboKVCache):
            context = target
            if self.refresh:
                context = target.select(0)
                context.crop(kept)
            if target.positions is not None:
                following = int(target.next_positions[0])
                longest = max(map(len, candidates))
                after = [*target.positions[0, kept : len(ids)].tolist(), *range(following, following + longest + 1)]
        self.groups = []
        for length, own in groupby(sorted(candidates, key=len), key=len):
            given = torch.tensor(list(own), dtype=torch.int64)
            width = len(prefix) + length + 1
            shown = [*[codes.mask] * length, codes.eos] if place == "masked" else []
            self.groups.append(
                CandidateRows(
                    context=() if arm == "full" else (*ids, *([] if context is not None else shown)),
                    kept=kept,
                    count=given.numel(),
                    width=width,
                    cache=context,
                    codes=codes,
                    prefix=prefix,
                    candidates=given,
                    positions=torch.tensor(after[:width]) if after else None,
                )
            )

    def result(self, predicted: Sequence[Tensor]) -> Scores:
        """Scores from the log-probabilities of each group."""
        left: dict[int, Iterator[list[float]]] = {}
        for group, own in zip(self.groups, predicted, strict=True):
            left[group.candidates.shape[1]] = iter(own.reshape(group.candidates.shape).tolist())
        codes = self.turbo.codes
        scores = tuple(
            CandidateScore(codes.decode(ids), tuple(next(left[len(ids)])), unknown_residues=self.unknown_residues)
            for ids in self.candidates
        )
        preset = arm_preset(self.turbo, self.arm, (group.cache for group in self.groups))
        return Scores(scores, self.arm, preset, self.place, self.refresh, self.turbo.name)


class ComparedRows(ItemRows[Scores]):
    """A target with candidates, and the same candidates in the contexts of a background.

    Args:
        target: the rows of the target.
        others: those of each context of the background.
        background: its name.
    """

    def __init__(self, target: TargetRows, others: Sequence[TargetRows], background: str) -> None:
        self.items, self.background = [target, *others], background
        self.groups = [group for item in self.items for group in item.groups]

    def result(self, predicted: Sequence[Tensor]) -> Scores:
        """Scores with their specificity."""
        rest = iter(predicted)
        found, *others = (item.result([next(rest) for _ in item.groups]) for item in self.items)
        return found.with_background(figures_in(one.by_candidate() for one in others), self.background)


def specificities(scores: Sequence[CandidateScore]) -> tuple[str, list[float | None]]:
    """The unit in which candidates are ranked by specificity, and that of each.

    It is `s.d.`, of `specificity_z`, if all that have a background have it, and any has; or else `nats`.
    """
    compared = [one for one in scores if one.background is not None]
    in_spreads = bool(compared) and all(one.specificity_z is not None for one in compared)
    return (
        "s.d." if in_spreads else "nats",
        [one.specificity_z if in_spreads else one.specificity for one in scores],
    )


def compared_with(background: str | None, scores: Iterable[CandidateScore]) -> str | None:
    """What candidates were compared with, such as `12 decoys`, or `1 to 3 other targets` where some were with fewer."""
    if background in (None, "alone"):
        return background and "no target"
    contexts = sorted({one.background.contexts for one in scores if one.background is not None}) or [0]
    from_ = f"{contexts[0]:,} to " if len(contexts) > 1 else ""
    return from_ + counted(contexts[-1], "other target" if background == "targets" else "decoy")


def compared(
    targets: Sequence[str], scores: Sequence[Scores], background: str, elsewhere: Iterable[tuple[str, Scores]] | None
) -> list[Scores]:
    """Scores with their specificity.

    Args:
        targets: residues of their targets.
        background: its name.
        elsewhere: residues of the contexts of the background, and scores of the candidates in each; None compares those
            on all other targets.

    Raises:
        ValueError: as of `figures_elsewhere`.
    """
    if elsewhere is not None:
        figures = figures_elsewhere(targets, [(residues, one.by_candidate()) for residues, one in elsewhere])
    else:
        figures = figures_on_others([(t, one.by_candidate()) for t, one in zip(targets, scores, strict=True)])
    return [one.with_background(own, background) for one, own in zip(scores, figures, strict=True)]


def chosen_again(scores: Sequence[Scores], top: int, background: str | None) -> list[list[int]]:
    """Indices of the candidates of each target that are scored again exactly: the best.

    Where other targets are the background that ranks, a candidate that is among the best on one target is scored again
    on all of its targets.
    """
    best = [one.ranking()[:top] for one in scores]
    if scores[0].sort_by == "likelihood" or background != "targets":
        return best
    known = {one.scores[index].candidate for one, own in zip(scores, best, strict=True) for index in own}
    return [[index for index, one in enumerate(own.scores) if one.candidate in known] for own in scores]


def scored_residues(candidate: str, unknown_residues: UnknownResidues) -> int:
    """Number of residues of a candidate that its figures are of."""
    return len(candidate) - sum(map(candidate.count, left_out(unknown_residues)))


def left_out(unknown_residues: UnknownResidues) -> str:
    """Letters whose probabilities no figure is of: a break between chains is no residue."""
    return CHAIN_BREAK + (UNKNOWN if unknown_residues == "omit" else "")


def target_ids(codes: TokenCodes, target: str | ProteinRecord) -> list[int]:
    """Token ids of a target, none for `NO_TARGET`.

    Raises:
        ValueError: the target is empty or has a letter that is not a residue.
    """
    return [] if target == NO_TARGET else codes.encode(target, "the target")


def cached_target(codes: TokenCodes, cache: TurboKVCache) -> list[int]:
    """Token ids of a target in a cache.

    Raises:
        ValueError: the cache has several rows, no residues, or an `<eos>`.
    """
    ids = single_row(cache, "a target")
    if codes.eos in ids:
        raise ValueError("the cache holds an <eos>, which belongs after the candidate: see `turbo.prefill`")
    if len(ids) == ids.count(codes.cls):
        raise ValueError("the cache holds no residues: prefill a target first")
    return ids


def check_candidates(
    codes: TokenCodes, candidates: Sequence[str], unknown_residues: UnknownResidues, where: str = ""
) -> None:
    """Check candidates.

    Args:
        where: added to the number of a candidate in an error.

    Raises:
        ValueError: one is empty, has a letter that is not a residue, or a mask, or no residue that its figures are of.
    """
    for number, sequence in enumerate(candidates, start=1):
        name = f"candidate {number}{where}"
        # Two peptides in one string would be scored as one.
        if len(sequence.split()) > 1:
            raise ValueError(f"{name}: has a space inside; remove it, or give two candidates")
        if codes.mask in (residues := codes.encode(sequence, name)):
            raise ValueError(f"{name}: holds a <mask>, which has no likelihood; give residues only")
        if not scored_residues(letters := codes.decode(residues), unknown_residues):
            if not letters.strip(CHAIN_BREAK):
                raise ValueError(f"{name}: {sequence!r} has no residue")
            raise ValueError(
                f"{name}: {sequence!r} holds none but unknown residues (B, X, Z); leave it out, or count them by"
                " `unknown_residues` 'score'"
            )


def warn_of_peptides(turbo: ContextModel, stacklevel: int = 2) -> None:
    """Warn, once, of what a model's family was not trained on."""
    encoder = turbo.model.base_model
    if encoder.peptide_notice is not None and encoder not in _warned:
        _warned.add(encoder)
        warnings.warn(encoder.peptide_notice, UntrainedInputWarning, stacklevel=stacklevel)


# Not noted on the models themselves, whose options decide what they compute.
_warned: WeakSet[Any] = WeakSet()
