"""New residues: to the right of a prefix, or in place of chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.options import UnmaskingOrder
from esm_turbo.tasks.generation.left_to_right import LeftToRight
from esm_turbo.tasks.generation.sampling import (
    Allowed,
    AllowedResidues,
    ResidueSampler,
    Sampling,
    check_count,
    row_seeds,
)
from esm_turbo.tasks.generation.unmasking import MaskedBatch, unmask

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Chosen by measurement, see docs/generation.md.
_APPEND_EVERY, _FILL_EVERY = 1, 8


@dataclass(frozen=True)
class GenerationOutput:
    """What was generated, one row for every returned sequence: the samples of the first input, then of the second.

    Attributes:
        sequences: residues; a `<mask>` of the input that was not to be filled stands as such.
        positions: of the new residues, counted from 1, in order.
        log_probs: of the new residues when they were drawn, in the order of `positions`: under the model's whole
            distribution at their position, before temperature, cuts and constraints.
        cache: of `<cls>` and all residues, where it was asked for.
    """

    sequences: list[str]
    positions: list[list[int]]
    log_probs: list[list[float]]
    cache: TurboKVCache | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What is generated and how; what does not depend on the sequences is checked here.

    With `max_new_tokens`, that many residues to the right of each sequence, one after the other. Otherwise residues in
    place of every `<mask>`, or at `positions`.

    Attributes:
        max_new_tokens: residues to append to each sequence.
        positions: which residues to replace, counted from 1: of every sequence, or a list for each. None is every
            `<mask>`.
        order: in which positions are drawn: `random` (None), `confidence` (where the model is most certain first; in
            later sweeps the residues it found least likely first) or `left_to_right`.
        per_step: positions of a sequence that are drawn at a step.
        sweeps: how often each position is drawn; from the second on it is masked once more, all others standing
            (Gibbs sampling).
        num_return_sequences: samples of each sequence.
        temperature: divides the logits; 0 takes the likeliest residue.
        top_k: draw among so many likeliest residues; None for all.
        top_p: draw among the likeliest residues that together have this probability.
        allowed: residues that may be generated: letters for all positions, or by position, counted from 1; everywhere
            else the 20 standard ones.
        banned: residues that are never generated.
        refresh: with `max_new_tokens`, how many of the last residues a refresh is for; otherwise residues on either
            side of the chosen ones that run with them at every step. None is 8.
        refresh_every: steps from one refresh to the next. With `max_new_tokens`, the last residues are then taken off
            the cache, run together and stored anew (None is 1); otherwise the whole protein is (None is 8). So 1
            computes every step in full, with `max_new_tokens` where `refresh` is the whole length too.
        return_cache: with `max_new_tokens`, also return the cache of what was generated.

    Raises:
        ValueError: an option is out of its range or does not go with the others.
    """

    max_new_tokens: int | None = None
    positions: Sequence[int] | Sequence[Sequence[int]] | None = None
    order: UnmaskingOrder | None = None
    per_step: int = 1
    sweeps: int = 1
    num_return_sequences: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    allowed: Allowed = None
    banned: str = ""
    refresh: int | None = None
    refresh_every: int | None = None
    return_cache: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("per_step", 1),
            ("sweeps", 1),
            ("num_return_sequences", 1),
            ("refresh", 0),
            ("refresh_every", 1),
        ):
            value = getattr(self, name)
            if value is not None or name in ("per_step", "sweeps", "num_return_sequences"):
                check_count(name, value, least)
        if self.order is not None and self.order not in get_args(UnmaskingOrder):
            raise ValueError(f"`order` must be one of {list(get_args(UnmaskingOrder))}, got {self.order!r}")
        if self.max_new_tokens is None:
            if self.return_cache:
                raise ValueError("`return_cache` goes with `max_new_tokens` only")
        elif self.positions is not None or self.order is not None or (self.per_step, self.sweeps) != (1, 1):
            raise ValueError("`positions`, `order`, `per_step` and `sweeps` do not go with `max_new_tokens`")
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """How a residue is drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def constraint(self, turbo: ContextModel) -> AllowedResidues:
        """Which residues may be generated.

        Raises:
            ValueError: a letter is no residue, or none is left.
        """
        return AllowedResidues(turbo.codes, turbo.model.config.vocab_size, self.allowed, self.banned)


def generate(
    turbo: ContextModel,
    sequences: Sequence[str] | TurboKVCache,
    options: GenerationOptions,
    seed: int | Sequence[int] = 0,
) -> GenerationOutput:
    """Generates residues.

    Special tokens are never generated, so that there are always as many residues as were asked for. All sequences form
    one batch; no row depends on another.

    Args:
        turbo: the model.
        sequences: residues; `<mask>` may stand for one. To append, also a cache of such contexts as
            `ContextModel.prefill` makes it; it stays as it is.
        options: what and how.
        seed: one for all, from which those of the rows follow, or one for each row. The same seed gives the same
            residues with the same model on the same backend.

    Raises:
        ValueError: a sequence is bad, a position does not exist, no residue may stand at one, or the preset needs a
            calibration and there is none.
    """
    inputs = _Inputs.of(turbo, sequences)
    repeats = options.num_return_sequences
    sampler = ResidueSampler(options.sampling, options.constraint(turbo), row_seeds(seed, len(inputs.rows) * repeats))
    refresh = DEFAULT_REFRESH if options.refresh is None else options.refresh
    if options.max_new_tokens is not None:
        ends = [len(row) + options.max_new_tokens for row in inputs.rows]
        _check_constrained(
            sampler.allowed, [range(len(row) + 1, end + 1) for row, end in zip(inputs.rows, ends, strict=True)]
        )
        warn_if_long(ends, stacklevel=3)
        decoder = LeftToRight(turbo, inputs.contexts(turbo, repeats), refresh, options.refresh_every or _APPEND_EVERY)
        return _append(turbo, decoder, sampler, options.max_new_tokens, options.return_cache)
    if inputs.cache is not None:
        raise ValueError("a cache can only be appended to: give `max_new_tokens`")
    chosen = _chosen(turbo, inputs.rows, options.positions)
    _check_constrained(sampler.allowed, chosen)
    warn_if_long([len(row) for row in inputs.rows], stacklevel=3)
    batch = MaskedBatch(
        turbo,
        [[turbo.codes.cls, *row, turbo.codes.eos] for row in inputs.rows for _ in range(repeats)],
        [columns for columns in chosen for _ in range(repeats)],
        refresh,
        options.refresh_every or _FILL_EVERY,
    )
    log_probs = unmask(batch, sampler, turbo.codes.mask, options.order or "random", options.per_step, options.sweeps)
    return GenerationOutput(
        [turbo.codes.decode(row[1:-1]) for row in batch.rows],
        batch.chosen,
        [[row[column] for column in columns] for row, columns in zip(log_probs, batch.chosen, strict=True)],
    )


@dataclass(frozen=True)
class _Inputs:
    """What generation starts from: token ids of the residues of each row, and a cache of them where one was given."""

    rows: list[list[int]]
    cache: TurboKVCache | None = None

    @classmethod
    def of(cls, turbo: ContextModel, sequences: Sequence[str] | TurboKVCache) -> _Inputs:
        codes = turbo.codes
        if not isinstance(sequences, TurboKVCache):
            return cls([codes.encode(sequence, f"sequence {i}") for i, sequence in enumerate(sequences, start=1)])
        turbo.model.claim_cache(sequences)
        ids, lengths = sequences.token_ids.tolist(), sequences.lengths.tolist()
        rows = [row[:n] for row, n in zip(ids, lengths, strict=True)]
        for number, row in enumerate(rows, start=1):
            if row[:1] != [codes.cls] or len(row) < 2 or codes.eos in row:
                raise ValueError(
                    f"row {number} of the cache is no context of <cls> and residues without <eos>, as `prefill` makes"
                )
        if not rows:
            raise ValueError("the cache is empty: prefill a context first")
        return cls([row[1:] for row in rows], sequences)

    def contexts(self, turbo: ContextModel, repeats: int) -> TurboKVCache:
        """A cache of its own for every row to be returned."""
        cache = self.cache
        if cache is None:
            cache = turbo.prefill([turbo.codes.decode(row) for row in self.rows])
        return cache.select([row for row in range(len(self.rows)) for _ in range(repeats)])


def _append(
    turbo: ContextModel, decoder: LeftToRight, sampler: ResidueSampler, new_tokens: int, return_cache: bool
) -> GenerationOutput:
    rows = range(len(decoder.token_ids))
    begins = [len(ids) for ids in decoder.token_ids]
    log_probs: list[list[float]] = [[] for _ in rows]
    for _ in range(new_tokens):
        logits: Tensor = decoder.logits()
        # <cls> is token 0, so that the residue after n tokens has position n.
        tokens, scores = sampler.draw(logits, rows, [len(ids) for ids in decoder.token_ids])
        decoder.push(tokens)
        for row, score in zip(log_probs, scores, strict=True):
            row.append(score)
    return GenerationOutput(
        [turbo.codes.decode(ids[1:]) for ids in decoder.token_ids],
        [list(range(begin, begin + new_tokens)) for begin in begins],
        log_probs,
        decoder.finish() if return_cache else None,
    )


def _chosen(
    turbo: ContextModel, rows: Sequence[Sequence[int]], positions: Sequence[int] | Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """The positions of each row that are generated, counted from 1, in order."""
    if positions is None:
        given: list[Any] = [[i for i, token in enumerate(row, 1) if token == turbo.codes.mask] for row in rows]
        for number, chosen in enumerate(given, start=1):
            if not chosen:
                raise ValueError(
                    f"sequence {number}: nothing to generate: it has no <mask>; put some in, or give `positions` or"
                    " `max_new_tokens`"
                )
        return given
    listed = list(positions)
    given = listed if any(not isinstance(one, int) for one in listed) else [listed] * len(rows)
    if len(given) != len(rows):
        raise ValueError(
            f"`positions` must be one list, or one for each of the {len(rows)} sequences, got {len(given)}"
        )
    chosen_rows = []
    for number, (row, own) in enumerate(zip(rows, given, strict=True), start=1):
        chosen = sorted(set(own))
        if not chosen:
            raise ValueError(f"sequence {number}: `positions` names none")
        for position in chosen:
            if type(position) is not int or not 1 <= position <= len(row):
                raise ValueError(f"sequence {number}: its positions are 1 to {len(row)}, got {position!r}")
        chosen_rows.append(chosen)
    return chosen_rows


def _check_constrained(constraint: AllowedResidues, generated: Sequence[Sequence[int]]) -> None:
    """A constraint for a position that is never generated is a mistake."""
    for position in sorted(constraint.by_position):
        if not any(position in positions for positions in generated):
            raise ValueError(f"`allowed` names position {position}, where nothing is generated")
