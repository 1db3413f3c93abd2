"""The row engine: rows of many items, such as targets with candidates, in batches that do not end where an item does.

Contexts come in waves: as many as a part of the memory holds are computed in batches, or read from a store. Those of
the next wave are read in another thread while the rows of this one run, also where they belong to the next `RowRun`.
A store's contexts that few rows read stay where they are in its device memory, held until their wave is done; those
that many rows read are copied, to be decoded. Rows of a wave that would not fill a batch by themselves share batches,
in which each names its context; where one context has enough rows for a batch of its own, it is read as by a single
item.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import torch
from torch import Tensor

from esm_turbo.config import TurboConfig
from esm_turbo.files.writing import is_full_disk
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.memory import available_bytes, is_out_of_memory
from esm_turbo.model.plan import FrozenQuery
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.proteins.batches import token_batches
from esm_turbo.tasks.common.context_sources import HoldingSource, ReadableSource
from esm_turbo.tasks.common.forwards import log_probabilities, maybe_decode, prefill_rows, should_decode
from esm_turbo.tasks.common.homologs import freeze_query
from esm_turbo.tasks.common.memory import cache_bytes, check_memory, halve_until_it_fits
from esm_turbo.tasks.common.rows import ItemRows, ResultT, RowBatch, RowGroup, RowRun, RowSlice

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Largest part of the free memory that the contexts of a wave may take, and tokens of contexts in a wave, in batches:
# with more the last batch of rows, which is not full, would matter less.
_SHARE, _BATCHES = 0.125, 4

_TokenIds = tuple[int, ...]
_log = logging.getLogger("esm_turbo")


@torch.no_grad()
def run_rows(
    turbo: ContextModel,
    runs: Iterable[RowRun[ResultT]],
    *,
    store: ReadableSource | None = None,
    advance: Callable[[int], None] = lambda rows: None,
) -> Generator[ResultT | Exception, None, None]:
    """Run the rows of items.

    Args:
        runs: taken a wave ahead.
        store: holds contexts.
        advance: called with numbers of predicted tokens.

    Yields:
        For each item of each run, in order, its result; or why it has none, or does not fit into memory.
    """
    waves = _waves(turbo, runs)
    with ThreadPoolExecutor(1) as reader:
        following = next(waves, None)
        if following is not None:
            following.look_up(turbo, store, reader)
        while following is not None:
            wave = following
            found = {} if wave.found is None else wave.found.result()
            held, failed = _held_contexts(turbo, wave, found, store)
            # Now that those of this wave are in the store: the next one may need the same.
            following = next(waves, None)
            if following is not None:
                following.look_up(turbo, store, reader)
            _run_wave(turbo, wave, held, failed, advance)
            # What is read in place makes room for the contexts of later waves.
            for cache in {id(one.cache): one.cache for one in found.values()}.values():
                if isinstance(cache, PooledContexts):
                    cache.release()
            finished = wave.finished
            del wave, found, held, failed
            for item in finished:
                yield item.result()


@dataclass
class _Item(Generic[ResultT]):
    """An item, and what is predicted of its groups."""

    rows: ItemRows[ResultT] | Exception
    predicted: dict[int, Tensor | Exception] = field(default_factory=dict)

    def result(self) -> ResultT | Exception:
        if isinstance(self.rows, Exception):
            return self.rows
        values = [self.predicted[number] for number in range(len(self.rows.groups))]
        failure = next((one for one in values if isinstance(one, Exception)), None)
        return failure or self.rows.result([one for one in values if isinstance(one, Tensor)])


class _Job(NamedTuple):
    """A group of an item."""

    item: _Item[Any]
    number: int
    group: RowGroup
    context: _TokenIds

    def put(self, predicted: Tensor | Exception) -> None:
        self.item.predicted[self.number] = predicted


class _ContextRow(NamedTuple):
    """Where a context of a wave is: a row of a cache."""

    cache: TurboKVCache
    row: int


@dataclass
class _Wave:
    """Groups whose contexts are held together.

    Attributes:
        config: see `RowRun`, as is `toks_per_batch`.
        jobs: the groups.
        finished: items of which no groups follow.
        found: contexts that are in the store, once they are looked up.
    """

    config: TurboConfig | None
    toks_per_batch: int
    jobs: list[_Job] = field(default_factory=list)
    finished: list[_Item[Any]] = field(default_factory=list)
    found: Future[dict[_TokenIds, _ContextRow]] | None = None

    def look_up(self, turbo: ContextModel, store: ReadableSource | None, reader: ThreadPoolExecutor) -> None:
        """Begin to read the contexts that are in the store."""
        if store is None or self.config is None:
            return
        device = turbo.model.device
        wanted: dict[_TokenIds, int] = {}
        for *_, group, context in self.jobs:
            if context and group.cache is None:
                # On a device, decoded contexts are read fast only as a whole.
                decodes = device.type == "cpu" or not group.hides
                wanted[context] = wanted.get(context, 0) + decodes * group.tokens
        appended = {job.context for job in self.jobs if job.group.query}
        if wanted:
            self.found = reader.submit(_stored, turbo, store, self.config, wanted, appended, _as_here(device))


def _waves(turbo: ContextModel, runs: Iterable[RowRun[ResultT]]) -> Iterator[_Wave]:
    """The groups of all runs, as many in a wave as have contexts that fit into memory together; at least one."""
    # Once: the contexts of one run must not change how those of the next are divided into waves.
    free = functools.cache(available_bytes)
    for items, config, toks_per_batch in runs:
        limit = _BATCHES * toks_per_batch
        if config is not None and (left := free(turbo.model.device)) is not None:
            limit = min(limit, int(_SHARE * left / max(1, cache_bytes(turbo.model.base_model, 1024, config)) * 1024))
        wave, held, tokens = _Wave(config, toks_per_batch), dict[_TokenIds, int](), 0
        for rows in items:
            item = _Item(rows)
            for number, group in enumerate(() if isinstance(rows, Exception) else rows.groups):
                context = group.key
                # Whole proteins take as much.
                more = 0 if context in held else len(context) or group.width
                # A wave holds one part of a context.
                if wave.jobs and (tokens + more > limit or held.get(context, group.kept) != group.kept):
                    yield wave
                    wave, held, tokens, more = _Wave(config, toks_per_batch), {}, 0, len(context) or group.width
                wave.jobs.append(_Job(item, number, group, context))
                held |= {context: group.kept} if context else {}
                tokens += more
            wave.finished.append(item)
        if wave.finished:
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


def _stored(
    turbo: ContextModel,
    store: ReadableSource,
    config: TurboConfig,
    wanted: Mapping[_TokenIds, int],
    appended: Set[_TokenIds],
    as_there: contextlib.AbstractContextManager[None],
) -> dict[_TokenIds, _ContextRow]:
    """Contexts that are in the store, for so many tokens that may read them decoded.

    Args:
        wanted: the contexts.
        appended: those to which queries will be appended, as they cannot be in a pool.
        as_there: lets this thread read as that which reads them next.
    """
    with as_there:
        few, found = list[_TokenIds](), dict[_TokenIds, _ContextRow]()
        if isinstance(store, HoldingSource):
            few = [
                ids
                for ids, tokens in wanted.items()
                if ids not in appended and not should_decode(turbo, config, tokens)
            ]
            held, rows, copied = store.hold_found(turbo, few, config)
            if held is not None:
                found |= {few[number]: _ContextRow(held, row) for row, number in enumerate(rows)}
            found |= {few[number]: _ContextRow(cache, 0) for number, cache in copied.items()}
        in_place = set(few)
        rest = [ids for ids in wanted if ids not in in_place]
        caches = store.find(turbo, rest, config) if rest else []
        return found | {
            ids: _ContextRow(cache, 0) for ids, cache in zip(rest, caches, strict=True) if cache is not None
        }


def _held_contexts(
    turbo: ContextModel, wave: _Wave, found: Mapping[_TokenIds, _ContextRow], store: ReadableSource | None
) -> tuple[dict[_TokenIds, _ContextRow], dict[_TokenIds, Exception]]:
    """Where the contexts that a wave reads are, those that were found among them; and why others do not fit."""
    held, failed = dict(found), dict[_TokenIds, Exception]()
    kept = {job.context: job.group.kept for job in wave.jobs if job.context and job.group.cache is None}
    for cache in {id(one.cache): one.cache for one in found.values()}.values():
        rows = sorted((one.row, kept[ids]) for ids, one in found.items() if one.cache is cache)
        cache.crop(torch.tensor([tokens for _, tokens in rows]))
    missing, config = [ids for ids in kept if ids not in found], wave.config
    held |= {job.context: _ContextRow(job.group.cache, 0) for job in wave.jobs if job.group.cache is not None}

    def run(part: Sequence[int]) -> None:
        assert config is not None
        own = [missing[index] for index in part]
        cache = prefill_rows(turbo, own, config)
        if store is not None:
            _store_all(turbo, store, config, own, cache)
        if any(kept[ids] < len(ids) for ids in own):
            cache.crop(torch.tensor([kept[ids] for ids in own]))
        held.update({ids: _ContextRow(cache, row) for row, ids in enumerate(own)})

    def fail(index: int, error: Exception) -> None:
        failed[missing[index]] = error

    # The longest first, so that a lack of memory shows at once.
    for batch in reversed(token_batches([len(ids) for ids in missing], wave.toks_per_batch)):
        halve_until_it_fits(run, batch, fail)
    return held, failed


def _store_all(
    turbo: ContextModel,
    store: ReadableSource,
    config: TurboConfig,
    token_ids: Sequence[_TokenIds],
    cache: TurboKVCache,
) -> None:
    """Store contexts as far as the disk has room for them; rows need only those in memory."""
    try:
        store.keep(turbo, token_ids, cache, config)
    except OSError as error:
        if not is_full_disk(error):
            raise
        _log.warning("%s; it goes on without storing contexts", error)


def _run_wave(
    turbo: ContextModel,
    wave: _Wave,
    held: Mapping[_TokenIds, _ContextRow],
    failed: Mapping[_TokenIds, Exception],
    advance: Callable[[int], None],
) -> None:
    """Predict the rows of all groups; of one that does not fit into memory, keep the error."""
    budget = wave.toks_per_batch
    # What is read in place cannot be in one cache with anything else.
    sharing: dict[bool, list[_Job]] = {True: [], False: []}
    alone: list[_Job] = []
    for job in wave.jobs:
        if job.context in failed:
            job.put(failed[job.context])
            advance(job.group.count)
        elif job.context and job.group.tokens < budget and not job.group.query and job.group.predicts_one:
            sharing[isinstance(held[job.context].cache, PooledContexts)].append(job)
        else:
            alone.append(job)
    for jobs in sharing.values():
        if len({job.context for job in jobs}) < 2:
            alone += jobs
            continue
        places = [(job.group, held[job.context]) for job in jobs]
        parts = [RowSlice(group, torch.arange(group.count), place.cache, place.row) for group, place in places]
        try:
            found = predict_together(turbo, parts, budget)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            alone += jobs
            continue
        for job, predicted in zip(jobs, found, strict=True):
            job.put(predicted)
            advance(job.group.count)
    for job in alone:
        group, place = job.group, held.get(job.context)
        try:
            cache = place and (place.cache if place.cache.batch_size == 1 else place.cache.select(place.row))
            frozen = None
            if cache is not None and group.query:
                cache, frozen = freeze_query(turbo, cache, group.query)
            part = RowSlice(group, torch.arange(group.count), cache)
            job.put(*predict_together(turbo, [part], budget, advance, frozen))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            job.put(error.with_traceback(None))


def predict_together(
    turbo: ContextModel,
    parts: Sequence[RowSlice],
    budget: int,
    advance: Callable[[int], None] = lambda rows: None,
    frozen_query: FrozenQuery | None = None,
) -> list[Tensor]:
    """What is kept of rows that share batches, in which rows of similar width follow each other.

    Args:
        turbo: the model.
        parts: the rows; all contexts are stored under the same options, or there are none.
        budget: tokens per batch.
        advance: called with numbers of predicted tokens.
        frozen_query: the query at the end of the only context, of which the rows are parts; None for none.

    Returns:
        For each part what `RowGroup.reduce` keeps of its rows.
    """
    caches = list({id(part.cache): part.cache for part in parts if part.cache is not None}.values())
    begins = dict(zip(map(id, caches), accumulate((one.batch_size for one in caches), initial=0), strict=False))
    past, shared = 0, dict[str, Any]()
    if caches:
        # Contexts that were computed in one batch are read where they are.
        cache = caches[0] if len(caches) == 1 else TurboKVCache.cat(caches)
        past = cache.get_seq_length()
        # On a device, decoded contexts are read fast only as a whole.
        if turbo.model.device.type == "cpu" or not any(part.group.hides for part in parts):
            cache = maybe_decode(turbo, cache, sum(part.tokens for part in parts))
        shared["past_key_values"] = cache
        if frozen_query is not None:
            shared["frozen_query"] = frozen_query
    else:
        check_memory(turbo.model.base_model, max(part.group.width for part in parts))
    order = sorted(range(len(parts)), key=lambda number: parts[number].group.width)
    rows = [(number, row) for number in order for row in parts[number].numbers.tolist()]
    found: list[list[Tensor]] = [[] for _ in parts]
    for batch in token_batches([parts[number].group.width for number, _ in rows], budget):
        together = [
            (number, parts[number]._replace(numbers=torch.tensor([row for _, row in own])))
            for number, own in groupby((rows[i] for i in batch), key=lambda one: one[0])
        ]
        own = [part for _, part in together]
        made = [part.group.rows(part.numbers) for part in own]
        input_ids, at, options = _joined(turbo, made, [part.group.kept for part in own], past)
        if shared:
            index = [begins[id(part.cache)] + part.row for part in own for _ in part.numbers]
            options["context_index"] = index if shared["past_key_values"].batch_size > 1 else None
        values = log_probabilities(turbo, input_ids, at, **shared, **options)
        advance(at.numel())
        for (number, part), value in zip(together, values.split([len(part.numbers) for part in own]), strict=True):
            found[number].append(part.group.reduce(part.numbers, value))
    return [torch.cat(kept) for kept in found]


def _joined(
    turbo: ContextModel, parts: Sequence[RowBatch], kept: Sequence[int], past: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
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
    options: dict[str, Any] = {}
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
