"""`generate`: new residues after a prefix, or in place of chosen ones."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import Sequences, as_list
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.heads import check_head, check_reads_on
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.context_sources import ContextSource, check_store
from esm_turbo.tasks.common.forwards import default_config, default_storage
from esm_turbo.tasks.common.homologs import QueryContext, check_known, query_contexts
from esm_turbo.tasks.common.memory import cache_bytes, check_memory
from esm_turbo.tasks.common.options import UnmaskingOrder
from esm_turbo.tasks.common.same_model import call_on
from esm_turbo.tasks.generation.left_to_right import LeftToRight
from esm_turbo.tasks.generation.notation import format_positions, residues_at
from esm_turbo.tasks.generation.options import Allowed, GenerationOptions
from esm_turbo.tasks.generation.sampling import AllowedResidues, ResidueSampler, row_seeds
from esm_turbo.tasks.generation.unmasking import MaskedBatch, unmask

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel, Contexts

__all__ = ["GenerationOptions", "GenerationOutput", "generate", "generate_batch", "generation_steps"]

# Defaults of `refresh_every`, chosen by measurement: see docs/generation.md.
_APPEND_EVERY, _UNMASK_EVERY = 1, 8


@dataclass(frozen=True)
class GenerationOutput(Tabular):
    """Generated sequences, one row per sample: all samples of the first input, then of the second.

    Attributes:
        sequences: residues; a `<mask>` of the input that was not to be replaced stays.
        positions: positions of the new residues, counted from 1, in ascending order.
        log_probs: log-probabilities of the new residues when they were drawn, in the order of `positions`: under the
            model's whole distribution at the position, before temperature, cut-offs and constraints.
        cache: cache of `<cls>` and all residues, if requested.
    """

    sequences: list[str]
    positions: list[list[int]]
    log_probs: list[list[float]]
    cache: TurboKVCache | None = None

    def __repr__(self) -> str:
        new = counted(len(self.positions[0]), "new residue") if self.positions else None
        return named(self, counted(len(self.sequences), "sequence"), *([new] if new else []), cache=self.cache)

    @property
    def new_residues(self) -> list[str]:
        """The new residues of each sequence by themselves, in the order of `positions`."""
        return [residues_at(sequence, own) for sequence, own in zip(self.sequences, self.positions, strict=True)]

    @property
    def mean_log_probs(self) -> list[float]:
        """Mean log-probability of the new residues of each sequence, nats."""
        return [sum(own) / len(own) for own in self.log_probs]

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["new_residues", "mean_log_prob", "positions", "sequence"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per sequence its new residues, their mean log-probability and positions, and the whole sequence."""
        places = map(format_positions, self.positions)
        yield from zip(self.new_residues, self.mean_log_probs, places, self.sequences, strict=True)


def generate(
    turbo: ContextModel,
    sequences: Sequences | TurboKVCache,
    *,
    max_new_tokens: int | None = None,
    positions: Sequence[int] | Sequence[Sequence[int]] | None = None,
    order: UnmaskingOrder | None = None,
    per_step: int = 1,
    sweeps: int = 1,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    allowed: Allowed = None,
    banned: str = "",
    refresh: int | None = None,
    refresh_every: int | None = None,
    return_cache: bool = False,
    seed: int | Sequence[int] = 0,
    store: ContextSource | None = None,
    context: Contexts | None = None,
) -> GenerationOutput:
    """Generate residues after sequences (`max_new_tokens=`), or in place of their masks.

    Special tokens are never generated, so the number of new residues is always the requested one. All sequences form
    one batch; no row depends on another. Without a calibration and a named preset, contexts are kept at full
    precision.

    Args:
        sequences: residues; `<mask>` may stand for one. With `max_new_tokens`, also a cache of such contexts, as
            `ContextModel.prefill` makes it; it is not changed.
        seed: one seed, from which those of the rows are derived, or one per row. The same seed gives the same
            residues with the same model on the same backend.
        store: with `max_new_tokens`, a `ContextStore`, whose contexts are used and to which missing ones are added; of
            a family with exact contexts, one for `context`.
        context: of a family with exact contexts, such as E1, homologs that every sequence is read after, as of
            `tasks.variants.many.score_variants`; of several contexts, residues are drawn from the normalised mean of
            log-probabilities. Such a family has no `max_new_tokens`; every step runs the sequences whole, whatever
            `refresh` and `refresh_every` are.

    All other arguments are the fields of `GenerationOptions`.

    Raises:
        ValueError: a sequence is invalid, a position does not exist, no residue is allowed at one, `store` is no store,
            an option is out of range, the preset needs a calibration and there is none, the context is invalid, or the
            family reads no homologs or appends nothing.
        NotEnoughMemoryError: all rows together need more memory than is free.
    """
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        positions=positions,
        order=order,
        per_step=per_step,
        sweeps=sweeps,
        num_return_sequences=num_return_sequences,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        allowed=allowed,
        banned=banned,
        refresh=refresh,
        refresh_every=refresh_every,
        return_cache=return_cache,
    )
    given = sequences if isinstance(sequences, TurboKVCache) else as_list(sequences)
    return generate_batch(turbo, given, options, seed, store, context)


def generate_batch(
    turbo: ContextModel,
    sequences: Sequence[str] | TurboKVCache,
    options: GenerationOptions,
    seed: int | Sequence[int] = 0,
    store: ContextSource | None = None,
    context: Contexts | None = None,
) -> GenerationOutput:
    """See `generate`, whose options have been checked."""
    with call_on(turbo):
        steps = generation_steps(turbo, sequences, options, seed, store, context=context)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                made: GenerationOutput = end.value
                return made


def generation_steps(
    turbo: ContextModel,
    sequences: Sequence[str] | TurboKVCache,
    options: GenerationOptions,
    seed: int | Sequence[int] = 0,
    store: ContextSource | None = None,
    tokens: int | None = None,
    context: Contexts | None = None,
) -> Generator[int, None, GenerationOutput]:
    """As `generate`, step by step, for callers that do other work in between.

    Args:
        sequences: as of `generate`, and so are `options`, `seed`, `store` and `context`.
        tokens: that the model may run from one yield to the next, about; None is all of those that are appended.

    Yields:
        The number of tokens that were run.
    """
    check_store(store)
    cache = sequences if isinstance(sequences, TurboKVCache) else None
    exact = turbo.model.base_model.exact_contexts is not None
    if exact and (cache is not None or options.max_new_tokens is not None):
        check_reads_on(turbo.model.base_model, "appended residues")
    contexts = query_contexts(turbo, context, "full")
    if isinstance(sequences, TurboKVCache):
        rows = _rows_of_cache(turbo, sequences)
    else:
        rows = [turbo.codes.encode(sequence, f"sequence {i}") for i, sequence in enumerate(sequences, start=1)]
    repeats = options.num_return_sequences
    with default_storage(turbo):
        _check_memory(turbo, rows, options)
    sampler = ResidueSampler(options, allowed_residues(turbo, options), row_seeds(seed, len(rows) * repeats))
    refresh = DEFAULT_REFRESH if options.refresh is None else options.refresh
    if options.max_new_tokens is not None:
        ends = [len(row) + options.max_new_tokens for row in rows]
        new = [range(len(row) + 1, end + 1) for row, end in zip(rows, ends, strict=True)]
        check_constrained_positions(sampler.allowed, new)
        warn_if_long(ends, turbo.model.family, stacklevel=3)
        token_ids = None
        if cache is None:
            with default_storage(turbo):
                cache = _prefilled(turbo, rows, repeats, store)
            yield sum(map(len, rows))
            token_ids = [[turbo.codes.cls, *row] for row in rows for _ in range(repeats)]
        else:
            cache = cache.select([row for row in range(len(rows)) for _ in range(repeats)])
        decoder = LeftToRight(turbo, cache, refresh, options.refresh_every or _APPEND_EVERY, token_ids)
        return (yield from _append(turbo, decoder, sampler, options.max_new_tokens, options.return_cache, tokens))
    if cache is not None or (store is not None and not contexts):
        given = "a cache" if store is None else "contexts of a store"
        raise ValueError(f"{given} can only be appended to: give `max_new_tokens`")
    positions = _positions(turbo, rows, options.positions)
    check_constrained_positions(sampler.allowed, positions)
    warn_if_long([len(row) for row in rows], turbo.model.family, stacklevel=3)
    # With <cls> in column 0, a residue's column is its position.
    chosen = [columns for columns in positions for _ in range(repeats)]
    samples = [[turbo.codes.before[-1], *row, *turbo.codes.after] for row in rows for _ in range(repeats)]
    every, caches = options.refresh_every or _UNMASK_EVERY, list[TurboKVCache]()
    if exact:
        refresh, every = 0, 1
        for one in contexts or [QueryContext(())]:
            for number, row in enumerate(rows, start=1):
                check_known(turbo, row, f"sequence {number}")
                one.check_query(turbo, turbo.codes.whole(row), f"sequence {number}")
        caches = [one.prefilled(turbo, default_config(turbo), store) for one in contexts]
    batch = MaskedBatch(turbo, samples, chosen, refresh, every, caches)
    log_probs = yield from unmask(
        batch, sampler, turbo.codes.mask, options.order or "random", options.per_step, options.sweeps
    )
    return GenerationOutput(
        [turbo.codes.decode(row[1 : len(row) - len(turbo.codes.after)]) for row in batch.rows],
        batch.chosen,
        [[row[column] for column in columns] for row, columns in zip(log_probs, batch.chosen, strict=True)],
    )


def allowed_residues(turbo: ContextModel, options: GenerationOptions) -> AllowedResidues:
    """The constraint on residues for a model.

    Raises:
        ValueError: a letter is not a residue, no residue is left, or the language model head was never trained.
    """
    check_head(turbo.model, "lm_head")
    return AllowedResidues(turbo.codes, turbo.model.config.vocab_size, options.allowed, options.banned)


def _check_memory(turbo: ContextModel, rows: Sequence[Sequence[int]], options: GenerationOptions) -> None:
    """Check that all rows fit into memory, before anything is made for each of them."""
    esm, count = turbo.model.base_model, len(rows) * options.num_return_sequences
    longest = max(map(len, rows), default=0) + 2
    if options.max_new_tokens is None:
        check_memory(esm, longest, rows=count, more=cache_bytes(esm, count * longest))
        return
    whole = longest + options.max_new_tokens
    step = DEFAULT_REFRESH if options.refresh is None else options.refresh
    step = min(whole, step + (options.refresh_every or _APPEND_EVERY))
    more = cache_bytes(esm, count * whole)
    check_memory(esm, longest, rows=len(rows), more=more)
    check_memory(esm, step, rows=count, more=more)


def _rows_of_cache(turbo: ContextModel, cache: TurboKVCache) -> list[list[int]]:
    """Token ids of the residues of each row of a cache of contexts."""
    turbo.model.bind_cache(cache)
    rows = [row[:n] for row, n in zip(cache.token_ids.tolist(), cache.lengths.tolist(), strict=True)]
    for number, row in enumerate(rows, start=1):
        if row[:1] != [turbo.codes.cls] or len(row) < 2 or turbo.codes.eos in row:
            raise ValueError(
                f"row {number} of the cache is not a context of <cls> and residues without <eos>, as `prefill` makes it"
            )
    if not rows:
        raise ValueError("the cache is empty: prefill a context first")
    return [row[1:] for row in rows]


def _prefilled(
    turbo: ContextModel, rows: Sequence[Sequence[int]], repeats: int, store: ContextSource | None
) -> TurboKVCache:
    """A cache of rows of residues, each repeated. Rows that begin alike are computed once."""
    contexts = [turbo.codes.decode(row) for row in rows]
    number_of = {context: number for number, context in enumerate(dict.fromkeys(contexts))}
    distinct = list(number_of)
    cache = turbo.prefill_within_call(distinct) if store is None else store.get_or_prefill(turbo, distinct)
    chosen = [number_of[context] for context in contexts for _ in range(repeats)]
    if chosen != list(range(len(number_of))):
        cache.batch_select_indices(torch.tensor(chosen))
    return cache


def _append(
    turbo: ContextModel,
    decoder: LeftToRight,
    sampler: ResidueSampler,
    new_tokens: int,
    return_cache: bool,
    tokens: int | None,
) -> Generator[int, None, GenerationOutput]:
    """Append residues to every row, see `generation_steps`."""
    begins = [len(ids) for ids in decoder.token_ids]
    log_probs: list[list[float]] = [[] for _ in begins]
    # A refresh, the token before it and the mask.
    per_step = sum(min(begin, decoder.refresh) + 2 for begin in begins)
    count = new_tokens if tokens is None else max(1, tokens // per_step)
    for done in range(0, new_tokens, count):
        now = min(count, new_tokens - done)
        last = done + now == new_tokens
        for own, more in zip(log_probs, decoder.append(sampler, now, return_cache or not last), strict=True):
            own += more
        yield now * per_step
    return GenerationOutput(
        [turbo.codes.decode(ids[1:]) for ids in decoder.token_ids],
        [list(range(begin, begin + new_tokens)) for begin in begins],
        log_probs,
        decoder.finish() if return_cache else None,
    )


def _positions(
    turbo: ContextModel, rows: Sequence[Sequence[int]], positions: Sequence[int] | Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """The positions to generate in each row, counted from 1, in ascending order."""
    if positions is None:
        masked = [[i for i, token in enumerate(row, 1) if token == turbo.codes.mask] for row in rows]
        for number, own in enumerate(masked, start=1):
            if not own:
                raise ValueError(
                    f"sequence {number}: has no {turbo.codes.mask_symbol}, so there is nothing to generate; add masks,"
                    " or give `positions` or `max_new_tokens`"
                )
        return masked
    listed: list[Any] = list(positions)
    by_row = listed if listed and all(isinstance(one, Iterable) for one in listed) else [listed] * len(rows)
    if len(by_row) != len(rows):
        raise ValueError(
            f"`positions` must be one list, or one for each of the {len(rows)} sequences, got {len(by_row)}"
        )
    checked = []
    for number, (row, own) in enumerate(zip(rows, by_row, strict=True), start=1):
        for position in own:
            if type(position) is not int or not 1 <= position <= len(row):
                raise ValueError(f"sequence {number}: its positions are 1 to {len(row)}, got {position!r}")
            if row[position - 1] == turbo.codes.chain_break:
                raise ValueError(f"sequence {number}: position {position} is the break between two chains, no residue")
        if not (chosen := sorted(set(own))):
            raise ValueError(f"sequence {number}: `positions` is empty")
        checked.append(chosen)
    return checked


def check_constrained_positions(constraint: AllowedResidues, generated: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError if a constraint is on a position that is generated in no row."""
    for position in sorted(constraint.by_position):
        if not any(position in positions for positions in generated):
            raise ValueError(f"`allowed` names position {position}, where nothing is generated")
