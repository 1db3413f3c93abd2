"""How well candidates, peptides as a rule, continue a target: pseudo-log-likelihoods on one cached context.

As in PepMLM (Chen et al. 2024, arXiv:2310.03842) a candidate follows the target in one sequence and every residue of
it is masked in turn. With target T and residues c_1 ... c_m

    pseudo-log-likelihood = sum_i log p(c_i | T, c without c_i),    pseudo-perplexity = exp(-pseudo-log-likelihood / m),

probabilities over the whole vocabulary. A candidate takes m runs, which differ in the last m + 1 tokens only. So the
target is computed once for all candidates of a length, with masks in their place, and each run is an extension of this
one context by the candidate and `<eos>`; the last residues of the target run again with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.arms import FROZEN, arm_of, batch_tokens, check_arm, log_probabilities
from esm_turbo.tasks.common.options import Arm, Place
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.common.rankings import TOP_K, RankAgreement, rank_agreement
from esm_turbo.tasks.scoring.targets import CachedTarget, RecomputedTarget, StoredTarget, Target

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


@dataclass(frozen=True)
class CandidateScore:
    """One candidate's score.

    Attributes:
        candidate: its residues.
        log_probabilities: of each residue while it was masked, natural logarithms.
    """

    candidate: str
    log_probabilities: tuple[float, ...]

    @property
    def pseudo_log_likelihood(self) -> float:
        """Sum over the residues, nats."""
        return math.fsum(self.log_probabilities)

    @property
    def mean_log_probability(self) -> float:
        """Mean over the residues, nats; the higher the likelier."""
        return self.pseudo_log_likelihood / len(self.log_probabilities)

    @property
    def pseudo_perplexity(self) -> float:
        """From 1 up, the lower the likelier; does not grow with the length."""
        try:
            return math.exp(-self.mean_log_probability)
        except OverflowError:
            return math.inf

    def is_finite(self) -> bool:
        """Whether no residue's probability is NaN or zero."""
        return all(map(math.isfinite, self.log_probabilities))


@dataclass(frozen=True)
class Scores:
    """Scores of candidates on one target.

    Attributes:
        scores: in the order of the candidates.
        arm: `full`, `frozen` or `turbo`.
        preset: what the context was stored as; None for `full`.
        place: what stood in the candidate's place while the context was computed; None for `full`.
        refresh: residues of the target that ran again with every candidate; 0 for `full`.
    """

    scores: tuple[CandidateScore, ...]
    arm: Arm
    preset: str | None
    place: Place | None
    refresh: int

    @property
    def pseudo_perplexities(self) -> list[float]:
        return [score.pseudo_perplexity for score in self.scores]

    def ranking(self) -> list[int]:
        """Indices of the candidates, the lowest pseudo-perplexity first; equal ones keep their order."""
        return sorted(range(len(self.scores)), key=self.pseudo_perplexities.__getitem__)

    def agreement(self, reference: Scores, top_k: int = TOP_K) -> RankAgreement:
        """How well this ranking agrees with another of the same candidates, by log-probability per residue.

        Raises:
            ValueError: the candidates are others, or a score is not finite.
        """
        ours, theirs = ([(c.candidate, c.mean_log_probability) for c in one.scores] for one in (self, reference))
        if [candidate for candidate, _ in ours] != [candidate for candidate, _ in theirs]:
            raise ValueError("only scores of the same candidates in the same order can be compared")
        return rank_agreement([mean for _, mean in ours], [mean for _, mean in theirs], top_k)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "arm": self.arm,
            "preset": self.preset,
            "place": self.place,
            "refresh": self.refresh,
            "candidates": [
                {
                    "candidate": one.candidate,
                    "pseudo_log_likelihood": one.pseudo_log_likelihood,
                    "pseudo_perplexity": one.pseudo_perplexity,
                    "log_probabilities": list(one.log_probabilities),
                }
                for one in self.scores
            ],
        }


def score(
    turbo: ContextModel,
    context: str | TurboKVCache,
    candidates: str | Sequence[str],
    *,
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    place: Place | None = None,
    toks_per_batch: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Scores candidates as continuations of a target, every residue masked in turn.

    Args:
        turbo: the model.
        context: the target's residues; or a cache of one row without `<eos>`, as `turbo.prefill` and a store give it.
        candidates: residues of each, of any lengths.
        arm: `full` runs target and candidate anew for every mask; `frozen` extends a context kept at full precision;
            `turbo`, the default, one stored as the model's preset says. A cache makes its own arm.
        refresh: the target's last residues that run again together with every candidate, their stored keys and values
            set aside. More is closer to `full` and slower.
        place: compute the context with masks in the candidate's place (`masked`, the default), once for every length
            of the candidates, or alone (`empty`), once. A cache is taken as it is: `empty`.
        toks_per_batch: tokens of a batch, which bounds the memory; None chooses by arm and device.
        progress: called with stage `score` and residues, see `Progress`.

    Raises:
        ValueError: the target is empty or a candidate is, letters are no residues, an option is wrong, or the cache is
            empty, another model's, or of several rows.
        NotEnoughMemoryError: the target needs more memory than there is; says how much.
    """
    residues = _encode_all(turbo, candidates)
    if type(refresh) is not int or refresh < 0:
        raise ValueError(f"`refresh` must be an integer of at least 0, got {refresh!r}")
    target: Target
    if isinstance(context, TurboKVCache):
        if arm not in (None, arm_of(context)):
            raise ValueError(f"a cache of preset {context.config.name!r} is of arm {arm_of(context)!r}, not {arm!r}")
        if place not in (None, "empty"):
            raise ValueError(f"a cache was computed without candidates: `place` must be 'empty', got {place!r}")
        target = StoredTarget(context, turbo.codes, refresh)
        arm, preset, place = arm_of(context), context.config.name, "empty"
    else:
        arm = check_arm("turbo" if arm is None else arm)
        place = "masked" if place is None else place
        if place not in get_args(Place):
            raise ValueError(f"`place` must be one of {list(get_args(Place))}, got {place!r}")
        token_ids = turbo.codes.encode(context, "the target")
        if arm == "full":
            target = RecomputedTarget(turbo, token_ids)
        else:
            target = CachedTarget(turbo, token_ids, arm, place, refresh)
        preset = {"full": None, "frozen": FROZEN.name, "turbo": turbo.model.esm.turbo_config.name}[arm]
    budget = batch_tokens(toks_per_batch, arm, turbo.model.device)
    warn_if_long([target.residues + max(map(len, residues))], stacklevel=3)
    found: dict[int, tuple[float, ...]] = {}
    counter = StageProgress(progress, "score", sum(map(len, residues)))
    for length, members in _by_length(residues):
        flat: list[float] = []
        for values in _masked_log_probabilities(turbo, target, torch.tensor([residues[i] for i in members]), budget):
            flat += values
            counter.advance(len(values))
        for place_in_group, index in enumerate(members):
            found[index] = tuple(flat[place_in_group * length : (place_in_group + 1) * length])
    scores = tuple(CandidateScore(turbo.codes.decode(ids), found[index]) for index, ids in enumerate(residues))
    return Scores(scores, arm, preset, None if arm == "full" else place, target.refresh)


def _masked_log_probabilities(
    turbo: ContextModel, target: Target, candidates: Tensor, toks_per_batch: int
) -> Iterator[list[float]]:
    """Log-probabilities of the residues of candidates [k, m], each masked in turn: k m of them, batch by batch."""
    count, length = candidates.shape
    run = target.run(length)
    prefix, eos = torch.tensor(run.prefix, dtype=torch.int64), torch.tensor([turbo.codes.eos])
    copies = torch.arange(count * length)
    for part in copies.split(max(1, toks_per_batch // (len(prefix) + length + 1))):
        rows, at = part // length, part % length
        masked = candidates[rows].scatter(1, at[:, None], turbo.codes.mask)
        input_ids = torch.cat([prefix.expand(len(part), -1), masked, eos.expand(len(part), 1)], dim=1)
        found = log_probabilities(turbo, input_ids, len(prefix) + at, **run.options)
        values: list[float] = found.gather(1, candidates[rows, at][:, None])[:, 0].tolist()
        yield values


def _encode_all(turbo: ContextModel, candidates: str | Sequence[str]) -> list[list[int]]:
    candidates = [candidates] if isinstance(candidates, str) else list(candidates)
    if not candidates:
        raise ValueError("`candidates` must hold at least one candidate")
    encoded = [turbo.codes.encode(one, f"candidate {number}") for number, one in enumerate(candidates, start=1)]
    for number, ids in enumerate(encoded, start=1):
        if turbo.codes.mask in ids:
            raise ValueError(f"candidate {number}: holds a <mask>, which has no likelihood; give residues only")
    return encoded


def _by_length(residues: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Indices of the candidates of each length: no padding, and one context for all of them."""
    groups: dict[int, list[int]] = {}
    for index, ids in enumerate(residues):
        groups.setdefault(len(ids), []).append(index)
    return sorted(groups.items())
