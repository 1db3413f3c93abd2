"""Effects of substitutions, by what the model would put in a residue's place (Meier et al. 2021).

A substitution of residue i scores log p(mutant) - log p(wild type) at position i, where i is masked and all others are
the wild type's (masked marginals), or where nothing is masked (wild-type marginals). Several substitutions add up.

Masked marginals take one run a position, each of the whole protein. Here the wild type is computed once and cached,
and a run is an extension by one token: its cached column is hidden, and the mask stands there in its place. The other
columns were computed when the wild type's residue was still there, and can tell; the residues around the position
carry most of that, and run again with the mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.arms import FROZEN, arm_of, batch_tokens, check_arm, log_probabilities, prefill_ids
from esm_turbo.tasks.common.memory import check_memory
from esm_turbo.tasks.common.options import Arm, MarginalMethod
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.variants.substitutions import all_substitutions, parse_variant

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


@dataclass(frozen=True)
class VariantScore:
    """One variant's score.

    Attributes:
        variant: as it was given.
        score: the mutant's log-probability less the wild type's, summed over the substitutions, nats; the higher the
            likelier the mutant.
    """

    variant: str
    score: float


@dataclass(frozen=True)
class VariantScores:
    """Scores of variants of one protein.

    Attributes:
        scores: in the order of the variants.
        wild_type: residues of the protein.
        method: `masked` or `wild_type` marginals.
        arm: `full`, `frozen` or `turbo`.
        preset: what the wild type was stored as; None for `full`.
        refresh: residues around a position that ran again with its mask; 0 for `full` and for wild-type marginals.
    """

    scores: tuple[VariantScore, ...]
    wild_type: str
    method: MarginalMethod
    arm: Arm
    preset: str | None
    refresh: int

    @property
    def values(self) -> list[float]:
        """The scores alone."""
        return [one.score for one in self.scores]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "method": self.method,
            "arm": self.arm,
            "preset": self.preset,
            "refresh": self.refresh,
            "variants": [{"variant": one.variant, "score": one.score} for one in self.scores],
        }


def score_variants(
    turbo: ContextModel,
    wild_type: str | TurboKVCache,
    variants: str | Sequence[str] | None = None,
    *,
    method: MarginalMethod = "masked",
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    first_position: int = 1,
    toks_per_batch: int | None = None,
    progress: Progress | None = None,
) -> VariantScores:
    """Scores variants of a protein.

    Args:
        turbo: the model.
        wild_type: residues of the protein; or a cache of one row that holds it from `<cls>` on.
        variants: such as `H24C`, or `H24C:E26K` for several substitutions at once; None for all single ones.
        method: `masked` masks every position in turn; `wild_type` masks nothing, is much cheaper and less accurate.
        arm: `full` runs the whole protein for every position; `frozen` runs the position alone against the protein
            cached at full precision; `turbo`, the default, against it cached as the model's preset says. A cache makes
            its own arm.
        refresh: of masked marginals: residues around the position, half on each side, that run again with the mask.
        first_position: the number of the protein's first residue in the variants.
        toks_per_batch: tokens of a batch, which bounds the memory; None chooses by arm and device.
        progress: called with stage `score` and positions, see `Progress`.

    Raises:
        ValueError: the protein is empty or has letters that are no residues, a variant does not fit it, an option is
            wrong, or the cache is another model's, of several rows, or of something else than a whole protein.
        NotEnoughMemoryError: the protein needs more memory than there is; says how much.
    """
    if method not in get_args(MarginalMethod):
        raise ValueError(f"`method` must be one of {list(get_args(MarginalMethod))}, got {method!r}")
    if type(refresh) is not int or refresh < 0:
        raise ValueError(f"`refresh` must be an integer of at least 0, got {refresh!r}")
    cache: TurboKVCache | None
    if isinstance(wild_type, TurboKVCache):
        cache, ids = wild_type, _stored_protein(turbo, wild_type)
        if arm not in (None, arm_of(cache)):
            raise ValueError(f"a cache of preset {cache.config.name!r} is of arm {arm_of(cache)!r}, not {arm!r}")
        arm, preset = arm_of(cache), cache.config.name
    else:
        cache = None
        ids = [turbo.codes.cls, *turbo.codes.encode(wild_type, "the wild type"), turbo.codes.eos]
        if turbo.codes.mask in ids:
            raise ValueError("the wild type holds a <mask>; give residues only")
        arm = check_arm("turbo" if arm is None else arm)
        preset = {"full": None, "frozen": FROZEN.name, "turbo": turbo.model.esm.turbo_config.name}[arm]
    residues = turbo.codes.decode(token for token in ids if token not in (turbo.codes.cls, turbo.codes.eos))
    if variants is None:
        variants = all_substitutions(residues, first_position)
    names = [variants] if isinstance(variants, str) else list(variants)
    if not names:
        raise ValueError("`variants` must hold at least one variant")
    parsed = [parse_variant(name, residues, first_position) for name in names]
    budget = batch_tokens(toks_per_batch, arm, turbo.model.device)
    warn_if_long([len(residues)], stacklevel=3)
    # The rest of a refresh has to lie somewhere.
    refresh = min(refresh, len(residues) - 1) if method == "masked" and arm != "full" else 0
    positions = sorted({one.index for substitutions in parsed for one in substitutions})
    if arm == "full":
        check_memory(turbo.model.esm, len(ids), stored=False)
        jobs = _recomputed(turbo, ids, positions, method, budget)
    else:
        cache = prefill_ids(turbo, ids, arm) if cache is None else cache
        jobs = _extended(turbo, cache, ids, positions, method, refresh, budget)
    counter = StageProgress(progress, "score", len(positions))
    predicted: dict[int, Tensor] = {}
    for part, rows in jobs:
        predicted.update(zip(part, rows, strict=True))
        counter.advance(len(part))
    letters = turbo.codes.residues
    scores = tuple(
        VariantScore(
            name,
            sum(
                float(predicted[one.index][letters[one.mutant]] - predicted[one.index][letters[one.wild_type]])
                for one in substitutions
            ),
        )
        for name, substitutions in zip(names, parsed, strict=True)
    )
    return VariantScores(scores, residues, method, arm, preset, refresh)


def _recomputed(
    turbo: ContextModel, ids: Sequence[int], positions: Sequence[int], method: MarginalMethod, toks_per_batch: int
) -> Iterator[tuple[list[int], Tensor]]:
    """Log-probabilities [n, vocab_size] at residues, the protein run anew for each, or once where nothing is masked."""
    whole = torch.tensor([list(ids)])
    size = len(positions) if method == "wild_type" else max(1, toks_per_batch // len(ids))
    for part in torch.tensor(positions).split(size):
        # Residue i is token 1 + i.
        if method == "wild_type":
            yield part.tolist(), log_probabilities(turbo, whole, 1 + part[None])[0]
        else:
            masked = whole.repeat(len(part), 1).scatter(1, 1 + part[:, None], turbo.codes.mask)
            yield part.tolist(), log_probabilities(turbo, masked, 1 + part)


def _extended(
    turbo: ContextModel,
    cache: TurboKVCache,
    ids: Sequence[int],
    positions: Sequence[int],
    method: MarginalMethod,
    refresh: int,
    toks_per_batch: int,
) -> Iterator[tuple[list[int], Tensor]]:
    """The same by extensions in place: a position and the residues around it, against the others in the cache."""
    whole = torch.tensor(list(ids))
    residues = sum(token not in (turbo.codes.cls, turbo.codes.eos) for token in ids)
    width = refresh + 1
    for part in torch.tensor(positions).split(max(1, toks_per_batch // width)):
        start = (part - refresh // 2).clamp(0, residues - width)
        columns = 1 + start[:, None] + torch.arange(width)
        at = part - start
        input_ids = whole[columns]
        if method == "masked":
            input_ids = input_ids.scatter(1, at[:, None], turbo.codes.mask)
        past = torch.ones(len(part), len(ids), dtype=torch.int64).scatter(1, columns, 0)
        attention_mask = torch.cat([past, torch.ones_like(columns)], dim=1)
        options = {"attention_mask": attention_mask, "position_ids": columns, "past_key_values": cache}
        yield part.tolist(), log_probabilities(turbo, input_ids, at, **options)


def _stored_protein(turbo: ContextModel, cache: TurboKVCache) -> list[int]:
    """Token ids of the protein in a cache."""
    if cache.batch_size != 1:
        raise ValueError(f"a wild type is a cache of one row, this one has {cache.batch_size}: see `cache.select`")
    codes = turbo.codes
    ids: list[int] = cache.token_ids[0, : cache.get_seq_length()].tolist()
    inner = ids[1:-1] if ids[-1:] == [codes.eos] else ids[1:]
    whole = ids[:1] == [codes.cls] and inner and not {codes.cls, codes.eos, codes.mask} & set(inner)
    if not whole or cache.positions is not None:
        raise ValueError("the cache holds no whole protein from <cls> on: see `turbo.prefill`")
    return ids
