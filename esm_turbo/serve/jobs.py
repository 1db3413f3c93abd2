"""Requests as the engine runs them: in pieces, so that a long one keeps nobody waiting and ends with its client."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.errors import RequestError
from esm_turbo.tasks.common.forwards import prefill_ids
from esm_turbo.tasks.common.homologs import QueryContext
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.row_engine import predict_together
from esm_turbo.tasks.common.rows import ItemRows, RowGroup, RowSlice
from esm_turbo.tasks.embedding.embed import embed
from esm_turbo.tasks.generation.generate import GenerationOptions, GenerationOutput, generation_steps
from esm_turbo.tasks.generation.sampling import row_seeds

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache

NOT_FINITE = "the model's predictions are not finite; start the service with --dtype float32"


class Job(ABC):
    """A request that waits for the engine, or that it runs.

    Attributes:
        kind: of its work, whose speed is measured; a name for metrics.
        batch: pieces of jobs of the same `batch` run together; None lets each run alone.
        tokens: that the model will run for it, about.
        done: of these, how many have run, or need not as their results are there.
        ran: tokens that the model has run for it.
        left: whether there are pieces that the engine has not taken.
        future: its result; cancelling it takes the job out of the queue.
        report: called from the engine's thread with `done` and `tokens` whenever some have run.
        client: who has sent it.
        began: whether the engine has begun with it.
        arrived: when it was made, seconds of a monotonic clock.
    """

    kind: str
    batch: Hashable = None

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.done = self.ran = 0
        self.left = True
        self.future: Future[Any] = Future()
        self.report: Callable[[int, int], None] = lambda done, tokens: None
        self.client = ""
        self.began = False
        self.arrived = time.monotonic()

    @property
    @abstractmethod
    def least(self) -> int:
        """Tokens of the smallest piece that can be taken next, about."""

    @abstractmethod
    def take(self, turbo: ContextModel, contexts: Contexts, tokens: int) -> tuple[Any, int]:
        """The next piece, of `tokens` tokens at most where it can be cut so small: what `run` takes, and its tokens."""

    @abstractmethod
    def run(self, turbo: ContextModel, contexts: Contexts, works: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Run pieces of jobs of one `batch`, and yield for each its index and what `put` takes, once it is there."""

    @abstractmethod
    def put(self, found: Any) -> None:
        """Keep what a piece has given; pieces come in the order in which they were taken."""

    @abstractmethod
    def result(self) -> Any:
        """The result, once all pieces have run."""

    @property
    def over(self) -> bool:
        """Finished or cancelled."""
        return self.future.done()

    def succeed(self) -> None:
        """Give the result to whoever waits for it."""
        result = self.result()
        # Whoever waited may have gone in this moment.
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give an error to whoever waits for a result."""
        self.left = False
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def advance(self, tokens: int, ran: int | None = None) -> None:
        """Count tokens that are done, and of these all or `ran` as run just now."""
        self.done += tokens
        self.ran += tokens if ran is None else ran
        self.report(self.done, self.tokens)


class _Rows(NamedTuple):
    """Rows of one group of an item.

    Attributes:
        rows: and their context.
        key: of the context, equal for equal ones.
        number: of the group.
    """

    rows: RowSlice
    key: Hashable
    number: int


class ItemJob(Job):
    """Scores of an item, as `TurboEsm.score` or `TurboEsm.score_variants` computes them.

    Args:
        kind: `score` or `variants`.
        item: its rows.
        arm: of the model's preset.
    """

    batch = "rows"

    def __init__(self, kind: str, item: ItemRows[Any], arm: Arm) -> None:
        self.kind, self.item, self.arm = kind, item, arm
        contexts = {tuple(group.context) for group in item.groups}
        super().__init__(sum(group.tokens for group in item.groups) + sum(map(len, contexts)))
        self._predicted: list[list[Tensor]] = [[] for _ in item.groups]
        self._known: set[Hashable] = set()
        # The next row: its group, and the number in it.
        self._group = self._row = 0

    @property
    def least(self) -> int:
        """Tokens of a row."""
        return self.item.groups[self._group].width

    def take(self, turbo: ContextModel, contexts: Contexts, tokens: int) -> tuple[Any, int]:
        """The next rows, and their contexts: these stay in memory while there is room, or are computed again."""
        works, size, before = list[_Rows](), 0, self.ran
        while self.left and (not works or size + self.least <= tokens):
            number, group = self._group, self.item.groups[self._group]
            key = (tuple(group.context), group.kept)
            decodes = turbo.model.device.type == "cpu" or not group.hides
            cache = None
            if group.context:
                compute = partial(self._context_of, group, turbo, contexts)
                cache = contexts.ready(key, compute, group.tokens if decodes else 0)
            if key[0] not in self._known:
                self._known.add(key[0])
                self.advance(len(group.context), 0)
            size = self.ran - before + sum(work.rows.tokens for work in works)
            numbers = torch.arange(group.count)[self._row :][: max(1, (tokens - size) // group.width)]
            works.append(_Rows(RowSlice(group, numbers, cache), key, number))
            size += works[-1].rows.tokens
            self._row += len(numbers)
            if self._row == group.count:
                self._group, self._row = number + 1, 0
                self.left = self._group < len(self.item.groups)
        return works, size

    def run(self, turbo: ContextModel, contexts: Contexts, works: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Rows on contexts that are stored alike share batches; where graphs are replayed, only those of one do."""
        together: dict[Hashable, list[tuple[int, _Rows]]] = {}
        # A graph per context takes the host less time than putting several together and launching every kernel.
        in_turn = turbo.model.base_model.replays
        for index, work in enumerate(works):
            for one in work:
                config = None if one.rows.cache is None else one.rows.cache.config
                together.setdefault((config, one.key if in_turn else None), []).append((index, one))
        missing, found = list(map(len, works)), [list[tuple[int, Tensor]]() for _ in works]
        for several in together.values():
            predicted = _predict(turbo, [one.rows for _, one in several])
            for (index, one), kept in zip(several, predicted, strict=True):
                found[index].append((one.number, kept))
                missing[index] -= 1
            yield from ((index, found[index]) for index in dict(several) if not missing[index])

    def put(self, found: Any) -> None:
        """Predictions of rows by the numbers of their groups."""
        for number, predicted in found:
            _check_finite(predicted)
            self._predicted[number].append(predicted)
            self.advance(len(predicted) * self.item.groups[number].width)

    def result(self) -> Any:
        """As of the call."""
        return self.item.result([torch.cat(own) for own in self._predicted])

    def _context_of(self, group: RowGroup, turbo: ContextModel, contexts: Contexts) -> TurboKVCache:
        """What the rows of a group read."""
        self.ran += len(group.context)
        cache = prefill_ids(turbo, group.context, self.arm, contexts)
        cache.crop(group.kept)
        return cache


class CheckJob(Job):
    """A request that is checked, in one piece; the result is what the check gives, such as another job."""

    kind = "check"
    least = 1

    def __init__(self, check: Callable[[], Any]) -> None:
        super().__init__(tokens=1)
        self._check, self._found = check, None

    def take(self, turbo: ContextModel, contexts: Contexts, tokens: int) -> tuple[Any, int]:
        """The check."""
        self.left = False
        return self._check, 1

    def run(self, turbo: ContextModel, contexts: Contexts, works: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """It alone."""
        [check] = works
        yield 0, check()

    def put(self, found: Any) -> None:
        """Keep what it gives."""
        self._found = found

    def result(self) -> Any:
        """As of the check."""
        return self._found


class SequencesJob(Job):
    """Something of each of some sequences, in pieces of whole sequences."""

    def __init__(self, sequences: Sequence[str], special: int) -> None:
        self._waiting, self._found = list(sequences), list[Any]()
        # Beside the residues.
        self._special = special
        super().__init__(sum(map(self._size, sequences)))

    @abstractmethod
    def call(self, turbo: ContextModel, contexts: Contexts, sequences: list[str]) -> Sequence[Any]:
        """What is asked of each sequence, all different."""

    def computed(self, turbo: ContextModel, contexts: Contexts, sequences: list[str]) -> set[str]:
        """Those of the sequences that the model runs in `call`."""
        return set(sequences)

    @property
    def least(self) -> int:
        """Tokens of the next sequence."""
        return self._size(self._waiting[0])

    def take(self, turbo: ContextModel, contexts: Contexts, tokens: int) -> tuple[Any, int]:
        """The next sequences, at least one."""
        taken, size = list[str](), 0
        while self._waiting and (not taken or size + self.least <= tokens):
            size += self.least
            taken.append(self._waiting.pop(0))
        self.left = bool(self._waiting)
        return taken, size

    def run(self, turbo: ContextModel, contexts: Contexts, works: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """One call for the sequences of all pieces, each once."""
        distinct = list(dict.fromkeys(sequence for work in works for sequence in work))
        computed = self.computed(turbo, contexts, distinct)
        found = dict(zip(distinct, self.call(turbo, contexts, distinct), strict=True))
        for index, work in enumerate(works):
            yield index, ([(one, found[one]) for one in work], sum(map(self._size, computed.intersection(work))))
            computed.difference_update(work)

    def put(self, found: Any) -> None:
        """Keep what was asked of the next sequences."""
        results, ran = found
        self._found += [one for _, one in results]
        self.advance(sum(self._size(sequence) for sequence, _ in results), ran)

    def _size(self, sequence: str) -> int:
        return len(sequence) + self._special


class ContextJob(SequencesJob):
    """Storing the context of a sequence; the result is its key."""

    kind = batch = "contexts"

    def __init__(self, sequence: str) -> None:
        super().__init__([sequence], special=1)

    def call(self, turbo: ContextModel, contexts: Contexts, sequences: list[str]) -> Sequence[Any]:
        """The keys."""
        return contexts.add(sequences)

    def computed(self, turbo: ContextModel, contexts: Contexts, sequences: list[str]) -> set[str]:
        """Those that are not stored."""
        return {one for one in sequences if contexts.store.count_missing(turbo, [one])}

    def result(self) -> Any:
        """The key."""
        return self._found[0]


class EmbedJob(SequencesJob):
    """Mean embeddings of sequences; the result is float32 [sequences, hidden_size].

    Args:
        sequences: residues of each.
        special: number of tokens beside the residues of each.
        context: homologs that each is read after.
    """

    kind = "embeddings"

    def __init__(self, sequences: Sequence[str], special: int, context: QueryContext | None = None) -> None:
        super().__init__(sequences, special)
        self.context = context
        self.batch = self.kind, None if context is None else context.ids

    def call(self, turbo: ContextModel, contexts: Contexts, sequences: list[str]) -> Sequence[Any]:
        """Of the last layer."""
        cache, given = None, self.context
        if given is not None:
            config = turbo.model.base_model.turbo_config
            key = (given.ids, len(given.ids))
            cache = contexts.ready(key, lambda: given.prefilled(turbo, config, contexts))
        embeddings = embed(turbo, sequences, include=["mean"], context=cache)
        return [mean for one in embeddings for mean in (one.mean_representations or {}).values()]

    def result(self) -> Any:
        """All means."""
        means = torch.stack(self._found)
        _check_finite(means)
        return means


class GenerateJob(Job):
    """New residues for one sequence, as `TurboEsm.generate` draws them.

    Args:
        sequence: residues and masks.
        residues: number of both.
        around: number of tokens around them.
        options: for this sequence alone; `positions` are given unless it appends.
        seed: of its samples.
        stored: whether the sequence is a stored context to append to.
        homologs: contexts that the sequence is read after, of a family that reads them; None for other families.
    """

    kind = "generate"

    def __init__(
        self,
        sequence: str,
        residues: int,
        around: int,
        options: GenerationOptions,
        seed: int,
        stored: bool,
        homologs: Sequence[str] | None = None,
    ) -> None:
        self.sequence, self.options, self.stored, self.homologs = sequence, options, stored, homologs
        self._seeds = row_seeds(seed, options.num_return_sequences)
        self._made: list[GenerationOutput] = []
        self._steps: Generator[int, None, GenerationOutput] | None = None
        refresh = 8 if options.refresh is None else options.refresh
        if options.max_new_tokens is not None:
            steps, per_step = options.max_new_tokens, min(residues + options.max_new_tokens, refresh) + 2
            # What a sample runs at once.
            self._at_once = per_step
        else:
            chosen = len(options.positions or ())
            steps = math.ceil(chosen / options.per_step) * options.sweeps
            if homologs is None:
                # A window around each chosen position, and now and then the whole protein.
                per_step = min(residues, chosen * (2 * refresh + 1)) + residues // (options.refresh_every or 8) + 1
                self._at_once = residues + around
            else:
                per_step = self._at_once = (residues + around) * max(1, len(homologs))
        before = sum(map(len, homologs or ()))
        super().__init__(before + residues + options.num_return_sequences * steps * per_step)

    @property
    def least(self) -> int:
        """Tokens of a step of one sample."""
        return self._at_once

    def take(self, turbo: ContextModel, contexts: Contexts, tokens: int) -> tuple[Any, int]:
        """Steps of as many samples as run at once; samples do not depend on each other."""
        if self._steps is None:
            count = max(1, tokens // self._at_once)
            seeds, self._seeds = self._seeds[:count], self._seeds[count:]
            options = replace(self.options, num_return_sequences=len(seeds))
            store = contexts if self.stored or self.homologs else None
            self._steps = generation_steps(turbo, [self.sequence], options, seeds, store, tokens, self.homologs or None)
        return (self._steps, tokens), tokens

    def run(self, turbo: ContextModel, contexts: Contexts, works: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Steps until they have run all tokens of the piece; how many they ran, and the samples if they are ready."""
        [(steps, tokens)] = works
        ran = 0
        while ran < tokens:
            try:
                ran += next(steps)
            except StopIteration as end:
                yield 0, (ran, end.value)
                return
        yield 0, (ran, None)

    def put(self, found: Any) -> None:
        """Go on with the samples, or with the next ones."""
        ran, made = found
        if made is not None:
            self._made.append(made)
            self._steps, self.left = None, bool(self._seeds)
        self.advance(ran)

    def result(self) -> GenerationOutput:
        """All samples."""
        return GenerationOutput(
            [sequence for made in self._made for sequence in made.sequences],
            [positions for made in self._made for positions in made.positions],
            [log_probs for made in self._made for log_probs in made.log_probs],
        )


def _predict(turbo: ContextModel, slices: Sequence[RowSlice]) -> list[Tensor]:
    """What is kept of rows, in batches as large as memory permits."""
    budget = sum(one.tokens for one in slices)
    while True:
        try:
            return predict_together(turbo, slices, budget)
        except Exception as error:
            if budget <= max(one.group.width for one in slices) or not is_out_of_memory(error):
                raise
            # It holds the frames of the failed run, and these its tensors.
            error.__traceback__ = None
        budget //= 2


def _check_finite(found: Tensor) -> None:
    if not bool(torch.isfinite(found).all()):
        raise RequestError(500, NOT_FINITE)
