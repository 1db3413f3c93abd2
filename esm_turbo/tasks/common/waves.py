"""Rows that extend the contexts of many proteins, in batches that do not end where a protein does.

Contexts come in waves: as many as a part of the memory holds are computed in batches, or read from a store. Those of
the next wave are read while the rows of this one run, also where they belong to another piece (`Ahead`). A
store's contexts that few rows read stay where they are in its device memory, held until their wave is done; those that
many rows read are copied, to be decoded. Rows of a wave that would not fill a batch by themselves share batches, in
which each names its context; where one context has enough rows for a batch of its own, it is read as by a single
protein.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, groupby, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from esm_turbo.config import TurboConfig
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.proteins.fasta import token_batches
from esm_turbo.tasks.common.ahead import Ahead
from esm_turbo.tasks.common.arms import (
    HoldingSource,
    ReadableSource,
    as_read_fastest,
    context_config,
    decoding_pays,
    log_probabilities,
    prefill_rows,
)
from esm_turbo.tasks.common.memory import cache_bytes, halve_until_it_fits

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Largest part of the free memory that the contexts of a wave may take, and tokens of contexts in a wave, in batches:
# with more the last batch of rows, which is not full, would matter less.
_SHARE, _BATCHES = 0.125, 4

TokenIds = tuple[int, ...]
ResultT = TypeVar("ResultT")


class Extensions(NamedTuple):
    """Rows that extend one context, as the model takes them.

    Attributes:
        input_ids: [n, width].
        at: index of the token to predict in each row, int64 [n].
        visible: tokens of the context that each row sees, [n, kept]; None for all.
        position_ids: [n, width]; None for those after the context.
    """

    input_ids: Tensor
    at: Tensor
    visible: Tensor | None = None
    position_ids: Tensor | None = None


class Held(NamedTuple):
    """Where a context of a wave is: a row of a cache."""

    cache: TurboKVCache
    row: int


@dataclass(frozen=True)
class Rows:
    """Rows that extend one context.

    Attributes:
        owner: number of the protein that they belong to.
        context: token ids that the context is computed from.
        kept: number of them that the rows read, the first ones.
        count: number of rows.
        width: tokens in each row.
        make: makes the rows of these numbers, int64 [n].
        hides: whether they hide tokens of the context from some rows.
    """

    owner: int
    context: TokenIds
    kept: int
    count: int
    width: int
    make: Callable[[Tensor], Extensions]
    hides: bool = False


def predict_rows(
    turbo: ContextModel,
    jobs: Iterable[Rows],
    arm: str,
    toks_per_batch: int,
    *,
    store: ReadableSource | None = None,
    advance: Callable[[int], None] = lambda rows: None,
    ahead: Ahead | None = None,
) -> Iterator[tuple[int, list[Tensor] | Exception]]:
    """Predict one token in each of many rows.

    Args:
        jobs: the rows, those of a protein one after the other; read as they are needed.
        arm: `frozen` or `turbo`.
        toks_per_batch: tokens per batch, of contexts and of rows.
        store: holds contexts.
        advance: called with numbers of rows done.
        ahead: begins to read the first contexts now; None reads them with the first result.

    Yields:
        For each protein, in order, its number and the log-probabilities of each of its jobs, float32
        [count, vocab_size] on the CPU; or the error, if it does not fit into memory.
    """
    if ahead is None:
        return _predict_alone(turbo, jobs, arm, toks_per_batch, store, advance)
    contexts = _Contexts(turbo, context_config(turbo, arm), toks_per_batch, store, ahead)
    waves = _waves(jobs, contexts)
    return _by_owner(_predicted(contexts, contexts.look_up(next(waves, None)), waves, advance))


def _predict_alone(
    turbo: ContextModel,
    jobs: Iterable[Rows],
    arm: str,
    toks_per_batch: int,
    store: ReadableSource | None,
    advance: Callable[[int], None],
) -> Iterator[tuple[int, list[Tensor] | Exception]]:
    """As `predict_rows`, which nothing follows."""
    with Ahead(turbo.model.device) as ahead:
        yield from predict_rows(turbo, jobs, arm, toks_per_batch, store=store, advance=advance, ahead=ahead)


def _by_owner(
    predicted: Iterator[tuple[int, Tensor | Exception]],
) -> Iterator[tuple[int, list[Tensor] | Exception]]:
    """The predictions of each protein, or the first error."""
    for owner, own in groupby(predicted, key=lambda one: one[0]):
        values = [value for _, value in own]
        failure = next((value for value in values if isinstance(value, Exception)), None)
        yield owner, failure or [value for value in values if isinstance(value, Tensor)]


def merge_errors(
    results: Iterator[tuple[int, ResultT]], invalid: Mapping[int, ValueError], count: int
) -> Iterator[tuple[int, ResultT | ValueError]]:
    """Results of proteins in order, and in their places the errors of those that have no rows.

    Args:
        results: by number of the protein.
        invalid: errors by number, there before any result of a later protein is.
        count: number of all proteins.
    """
    following = 0
    for index, result in results:
        yield from ((number, invalid[number]) for number in range(following, index) if number in invalid)
        yield index, result
        following = index + 1
    yield from ((number, invalid[number]) for number in range(following, count) if number in invalid)


@torch.no_grad()
def _predicted(
    contexts: _Contexts,
    following: _Wave | None,
    waves: Iterator[list[Rows]],
    advance: Callable[[int], None],
) -> Iterator[tuple[int, Tensor | Exception]]:
    """The predictions of each job, in order: those of the wave `following` and of all `waves` after it."""
    while following is not None:
        wave, ready = following.jobs, following.ready.result()
        held, failed = contexts.complete(wave, ready)
        # Now that those of this wave are in the store: the next one may need the same.
        following = contexts.look_up(next(waves, None))
        if following is None:
            contexts.ahead.begin_next()
        in_place = {id(one.cache): one.cache for one in ready.values() if isinstance(one.cache, PooledContexts)}
        results: dict[int, Tensor | Exception] = {}
        for number, result in _run_wave(contexts, wave, held, failed):
            results[number] = result
            advance(wave[number].count)
        # What is read in place makes room for the contexts of later waves.
        for cache in in_place.values():
            cache.release()
        del held, ready, in_place
        for number, job in enumerate(wave):
            yield job.owner, results[number]


def _waves(jobs: Iterable[Rows], contexts: _Contexts) -> Iterator[list[Rows]]:
    """The jobs in groups whose contexts fit into memory together; at least one in each."""
    wave: list[Rows] = []
    held: set[TokenIds] = set()
    tokens = 0
    for job in jobs:
        more = 0 if job.context in held else len(job.context)
        if wave and tokens + more > contexts.tokens_per_wave:
            yield wave
            wave, held, tokens, more = [], set(), 0, len(job.context)
        wave.append(job)
        held.add(job.context)
        tokens += more
    if wave:
        yield wave


def _as_here(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """For another thread, which has its own: the CUDA stream and the autocast of this one."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            if autocast is not None:
                stack.enter_context(torch.autocast(device.type, autocast))
            yield

    return entered()


class _Wave(NamedTuple):
    """Jobs whose contexts are held together.

    Attributes:
        jobs: the jobs.
        ready: which contexts were in the store.
    """

    jobs: list[Rows]
    ready: Future[dict[TokenIds, Held]]


class _Contexts:
    """Where the contexts of a wave come from.

    Attributes:
        ahead: reads those of the next wave.
        tokens_per_wave: largest number of tokens of the contexts of a wave.
    """

    def __init__(
        self,
        turbo: ContextModel,
        config: TurboConfig,
        toks_per_batch: int,
        store: ReadableSource | None,
        ahead: Ahead,
    ) -> None:
        self.turbo = turbo
        self.config = config
        self.toks_per_batch = toks_per_batch
        self.store = store
        self.ahead = ahead
        esm = turbo.model.base_model
        fits = _BATCHES * toks_per_batch
        if ahead.free is not None:
            fits = min(fits, int(_SHARE * ahead.free / max(1, cache_bytes(esm, 1024, config)) * 1024))
        self.tokens_per_wave = fits

    def look_up(self, wave: list[Rows] | None) -> _Wave | None:
        """Begin to read the contexts of a wave that are in the store; None if there is no wave."""
        if wave is None:
            return None
        device = self.turbo.model.device
        wanted: dict[TokenIds, int] = {}
        for job in wave:
            # On a device, decoded contexts are read fast only as a whole.
            decodes = device.type == "cpu" or not job.hides
            wanted[job.context] = wanted.get(job.context, 0) + decodes * job.count * job.width
        return _Wave(wave, self.ahead.readers.submit(self._stored, wanted, _as_here(device)))

    def _stored(
        self, wanted: Mapping[TokenIds, int], as_there: contextlib.AbstractContextManager[None]
    ) -> dict[TokenIds, Held]:
        """Contexts that are in the store, for so many tokens that may read them decoded.

        Args:
            wanted: the contexts.
            as_there: lets this thread read as that which reads them next.
        """
        if self.store is None:
            return {}
        with as_there:
            few, found = list[TokenIds](), dict[TokenIds, Held]()
            if isinstance(self.store, HoldingSource):
                few = [ids for ids, tokens in wanted.items() if not decoding_pays(self.turbo, self.config, tokens)]
                held, rows, copied = self.store.hold_found(self.turbo, few, self.config)
                if held is not None:
                    found |= {few[number]: Held(held, row) for row, number in enumerate(rows)}
                found |= {few[number]: Held(cache, 0) for number, cache in copied.items()}
            in_place = set(few)
            for ids in (ids for ids in wanted if ids not in in_place):
                cache = self.store.find(self.turbo, ids, self.config)
                if cache is not None:
                    found[ids] = Held(cache, 0)
            return found

    def complete(
        self, wave: Sequence[Rows], ready: dict[TokenIds, Held]
    ) -> tuple[dict[TokenIds, Held], dict[TokenIds, Exception]]:
        """Where all contexts of a wave are, with what is kept of them; and the errors of those that failed."""
        kept = {job.context: job.kept for job in wave}
        missing = [ids for ids in kept if ids not in ready]
        held, failed = dict(ready), dict[TokenIds, Exception]()
        for cache in {id(one.cache): one.cache for one in ready.values()}.values():
            rows = sorted((one.row, kept[ids]) for ids, one in ready.items() if one.cache is cache)
            cache.crop(torch.tensor([tokens for _, tokens in rows]))

        def run(part: Sequence[int]) -> None:
            own = [missing[index] for index in part]
            cache = prefill_rows(self.turbo, own, self.config)
            if self.store is not None:
                for ids, one in zip(own, cache.cut([len(ids) for ids in own]), strict=True):
                    self.store.get_or_compute(self.turbo, ids, self.config, repeat(one).__next__)
            if any(kept[ids] < len(ids) for ids in own):
                cache.crop(torch.tensor([kept[ids] for ids in own]))
            for row, ids in enumerate(own):
                held[ids] = Held(cache, row)

        def fail(index: int, error: Exception) -> None:
            failed[missing[index]] = error

        # The longest first, so that a lack of memory shows at once.
        for batch in reversed(token_batches([len(ids) for ids in missing], self.toks_per_batch)):
            halve_until_it_fits(run, batch, fail)
        return held, failed


def _run_wave(
    contexts: _Contexts,
    jobs: Sequence[Rows],
    held: dict[TokenIds, Held],
    failed: dict[TokenIds, Exception],
) -> Iterator[tuple[int, Tensor | Exception]]:
    """The predictions of each job, by its number in the wave, or the error if memory does not suffice."""
    turbo, budget = contexts.turbo, contexts.toks_per_batch
    few = [n for n, job in enumerate(jobs) if job.context in held and job.count * job.width < budget]
    # What is read in place cannot be in one cache with anything else.
    groups: dict[bool, list[int]] = {True: [], False: []}
    for number in few:
        groups[isinstance(held[jobs[number].context].cache, PooledContexts)].append(number)
    shared = [group for group in groups.values() if len({jobs[number].context for number in group}) > 1]
    joined = {number for group in shared for number in group}
    for number, job in enumerate(jobs):
        if job.context in failed:
            yield number, failed[job.context]
        elif number not in joined:
            yield number, _run_alone(turbo, job, held[job.context], budget)
    for group in shared:
        try:
            found = _run_joined(turbo, [jobs[number] for number in group], held, budget)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            yield from zip(group, found, strict=True)
            continue
        for number in group:
            yield number, _run_alone(turbo, jobs[number], held[jobs[number].context], budget)


def _run_alone(turbo: ContextModel, job: Rows, held: Held, budget: int) -> Tensor | Exception:
    """The predictions of a job whose rows share no batch with others."""
    try:
        cache, parts = held.cache if held.cache.batch_size == 1 else held.cache.select(held.row), []
        if not job.hides or turbo.model.device.type == "cpu":
            cache = as_read_fastest(turbo, cache, job.count * job.width)
        for numbers in torch.arange(job.count).split(max(1, budget // job.width)):
            made = job.make(numbers)
            input_ids, at, options = _batch(turbo, [made], [job.kept], job.kept)
            parts.append(log_probabilities(turbo, input_ids, at, past_key_values=cache, **options))
        return torch.cat(parts)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)


def _run_joined(turbo: ContextModel, jobs: Sequence[Rows], held: dict[TokenIds, Held], budget: int) -> list[Tensor]:
    """The predictions of jobs whose rows share batches, in which rows of similar width follow each other."""
    places = {job.context: held[job.context] for job in jobs}
    caches = list({id(place.cache): place.cache for place in places.values()}.values())
    # Contexts that were computed in one batch are read where they are.
    cache = caches[0] if len(caches) == 1 else TurboKVCache.cat(caches)
    begins = dict(zip(map(id, caches), accumulate((one.batch_size for one in caches), initial=0), strict=False))
    place = {ids: begins[id(one.cache)] + one.row for ids, one in places.items()}
    past = cache.get_seq_length()
    # On a device, decoded contexts are read fast only as a whole.
    if turbo.model.device.type == "cpu" or not any(job.hides for job in jobs):
        cache = as_read_fastest(turbo, cache, sum(job.count * job.width for job in jobs))
    order = sorted(range(len(jobs)), key=lambda number: jobs[number].width)
    rows = [(number, row) for number in order for row in range(jobs[number].count)]
    widths = [jobs[number].width for number, _ in rows]
    found: list[list[Tensor]] = [[] for _ in jobs]
    for batch in token_batches(widths, budget):
        groups = [(n, [row for _, row in own]) for n, own in groupby((rows[i] for i in batch), key=lambda one: one[0])]
        made = [jobs[number].make(torch.tensor(own)) for number, own in groups]
        input_ids, at, options = _batch(turbo, made, [jobs[number].kept for number, _ in groups], past)
        index = [place[jobs[n].context] for n, own in groups for _ in own]
        values = log_probabilities(turbo, input_ids, at, past_key_values=cache, context_index=index, **options)
        for (number, _), part in zip(groups, values.split([len(own) for _, own in groups]), strict=True):
            found[number].append(part)
    return [torch.cat(parts) for parts in found]


def _batch(
    turbo: ContextModel, parts: Sequence[Extensions], kept: Sequence[int], past: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Rows of several contexts in one batch, padded on the right.

    Args:
        parts: the rows of each context.
        kept: number of tokens of each context.
        past: number of tokens of the longest context of the cache.

    Returns:
        `input_ids` [n, width], `at` [n], and `attention_mask` and `position_ids`, if they are needed.
    """
    width = max(part.input_ids.shape[1] for part in parts)

    def padded(tensors: Iterable[Tensor], size: int, value: int) -> Tensor:
        return torch.cat([torch.nn.functional.pad(x, (0, size - x.shape[1]), value=value) for x in tensors])

    input_ids = padded((part.input_ids for part in parts), width, turbo.codes.pad)
    mask = padded((torch.ones_like(part.input_ids) for part in parts), width, 0)
    options: dict[str, Tensor] = {}
    if any(part.visible is not None for part in parts):
        seen = (
            torch.ones(len(part.at), tokens, dtype=torch.int64) if part.visible is None else part.visible
            for part, tokens in zip(parts, kept, strict=True)
        )
        options["attention_mask"] = torch.cat([padded(seen, past, 0), mask], dim=1)
    elif not bool(mask.all()):
        options["attention_mask"] = mask
    if any(part.position_ids is not None for part in parts):
        steps = torch.arange(width)
        given = (
            tokens + steps[: part.input_ids.shape[1]].expand(len(part.at), -1)
            if part.position_ids is None
            else part.position_ids
            for part, tokens in zip(parts, kept, strict=True)
        )
        options["position_ids"] = padded(given, width, 0)
    return input_ids, torch.cat([part.at for part in parts]), options
