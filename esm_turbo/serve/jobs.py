"""Requests as the engine runs them.

A `RowJob` consists of rows, of which the engine takes as many at a time as a batch has room for, so that a long request
does not keep short ones waiting. A `CallJob` runs at once, together with others of its kind.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.errors import RequestError
from esm_turbo.serve.rows import Rows
from esm_turbo.tasks.common.forwards import prefill_ids
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.rows import ItemRows, RowGroup
from esm_turbo.tasks.embedding.embed import embed
from esm_turbo.tasks.generation.generate import GenerationOptions, GenerationOutput, generate
from esm_turbo.tasks.generation.sampling import row_seeds

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache

NOT_FINITE = "the model's predictions are not finite; start the service with --dtype float32"


class Job(ABC):
    """A request that waits for the engine, or that it runs.

    Attributes:
        kind: name of the task, for metrics.
        tokens: that the model will run for it, about.
        done: of these, how many it has run.
        future: its result; cancelling it takes the job out of the queue.
        report: called from the engine's thread with `done` and `tokens` whenever some have run.
        began: whether the engine has begun with it.
        arrived: when it was made, seconds of a monotonic clock.
    """

    kind: str

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.done = 0
        self.future: Future[Any] = Future()
        self.report: Callable[[int, int], None] = lambda done, tokens: None
        self.began = False
        self.arrived = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether it has a result, or nobody waits for one."""
        return self.future.done()

    def succeed(self, result: Any) -> None:
        """Give the result to whoever waits for it."""
        self._end(lambda: self.future.set_result(result))

    def fail(self, error: BaseException) -> None:
        """Give an error to whoever waits for a result."""
        self._end(lambda: self.future.set_exception(error))

    def advance(self, tokens: int) -> None:
        """Count tokens that have run."""
        self.done += tokens
        self.report(self.done, self.tokens)

    def _end(self, end: Callable[[], None]) -> None:
        # Whoever waited may have gone in this moment.
        if not self.future.done():
            try:
                end()
            except InvalidStateError:
                return


@dataclass(frozen=True)
class ContextGroup:
    """Rows of a job that extend one context.

    Attributes:
        group: the rows.
        key: of the context, equal for equal ones.
        cache: the context.
        predicted: what is kept of each part of the rows, in order.
    """

    group: RowGroup
    key: Hashable
    cache: TurboKVCache
    predicted: list[Tensor]

    def rows(self, numbers: Tensor) -> Rows:
        """The rows of these numbers."""
        made = self.group.rows(numbers)
        options: dict[str, Tensor] = {}
        if made.visible is not None:
            options["attention_mask"] = torch.cat([made.visible, torch.ones_like(made.input_ids)], dim=1)
        if made.position_ids is not None:
            options["position_ids"] = made.position_ids
        return Rows(self.key, self.cache, made.input_ids, made.at, options)

    def keep(self, numbers: Tensor, log_probs: Tensor) -> None:
        """Take the predictions of the rows of these numbers, [n, vocab_size]."""
        self.predicted.append(self.group.reduce(numbers, log_probs))


@dataclass(frozen=True)
class RowSlice:
    """Rows that the engine took from a job, and where their predictions go."""

    job: RowJob
    rows: Rows
    numbers: Tensor
    group: ContextGroup

    def put(self, predicted: Tensor) -> None:
        """Give the job its predictions, float32 [n, vocab_size]."""
        if not bool(torch.isfinite(predicted).all()):
            raise RequestError(500, NOT_FINITE)
        self.group.keep(self.numbers, predicted)
        self.job.missing -= len(predicted)
        self.job.advance(self.rows.input_ids.numel())


class RowJob(Job):
    """A job of rows that extend contexts, taken in order.

    Attributes:
        left: number of rows that were not taken yet.
        missing: number of rows whose predictions are not there yet.
    """

    def __init__(self, tokens: int, rows: int) -> None:
        super().__init__(tokens)
        self.left = self.missing = rows
        self._groups: Iterator[ContextGroup] | None = None
        self._group: ContextGroup | None = None
        self._next = 0

    @abstractmethod
    def context_groups(self, turbo: ContextModel, contexts: Contexts) -> Iterator[ContextGroup]:
        """Its rows by context; each context is computed when its first row is about to be taken."""

    @abstractmethod
    def result(self, turbo: ContextModel) -> Any:
        """Its result, once all rows have run."""

    def take(self, turbo: ContextModel, contexts: Contexts, tokens: int) -> RowSlice:
        """The next rows of one context: as many as have `tokens` tokens, at least one."""
        if self._groups is None:
            self._groups = self.context_groups(turbo, contexts)
        if self._group is None or self._next == self._group.group.count:
            self._group, self._next = next(self._groups), 0
        current, begin = self._group, self._next
        self._next = min(current.group.count, begin + max(1, tokens // current.group.width))
        self.left -= self._next - begin
        numbers = torch.arange(begin, self._next)
        return RowSlice(self, current.rows(numbers), numbers, current)


class ItemJob(RowJob):
    """Scores of an item, as `TurboEsm.score` or `TurboEsm.score_variants` computes them.

    Args:
        kind: `score` or `variants`.
        item: its rows.
        arm: of the model's preset.
    """

    def __init__(self, kind: str, item: ItemRows[Any], arm: Arm) -> None:
        self.kind, self.item, self.arm = kind, item, arm
        contexts = {tuple(group.context) for group in item.groups}
        tokens = sum(group.tokens for group in item.groups) + sum(map(len, contexts))
        super().__init__(tokens, rows=sum(group.count for group in item.groups))
        self._predicted: list[list[Tensor]] = [[] for _ in item.groups]

    def context_groups(self, turbo: ContextModel, contexts: Contexts) -> Iterator[ContextGroup]:
        """A group after the other."""
        for group, predicted in zip(self.item.groups, self._predicted, strict=True):
            key = (tuple(group.context), group.kept)
            cache = contexts.ready(key, partial(self._context_of, group, turbo, contexts))
            if turbo.model.device.type == "cpu" or not group.hides:
                cache = contexts.maybe_decode(key, cache, group.tokens)
            yield ContextGroup(group, key, cache, predicted)

    def _context_of(self, group: RowGroup, turbo: ContextModel, contexts: Contexts) -> TurboKVCache:
        """What the rows of a group read."""
        cache = prefill_ids(turbo, group.context, self.arm, contexts)
        cache.crop(group.kept)
        return cache

    def result(self, turbo: ContextModel) -> Any:
        """As of the call."""
        return self.item.result([torch.cat(own) for own in self._predicted])


class CallJob(Job):
    """A job that runs in one call, together with others of equal `merge`."""

    merge: Hashable

    @abstractmethod
    def run(self, turbo: ContextModel, contexts: Contexts, jobs: Sequence[Any], toks_per_batch: int) -> list[Any]:
        """The results of `jobs`, itself among them, all of equal `merge`."""


class ContextJob(CallJob):
    """Storing the contexts of sequences; the result is their keys."""

    kind = "contexts"
    merge = "contexts"

    def __init__(self, sequence: str) -> None:
        self.sequence = sequence
        super().__init__(len(sequence) + 1)

    def run(self, turbo: ContextModel, contexts: Contexts, jobs: Sequence[Any], toks_per_batch: int) -> list[Any]:
        """One call for the sequences of all jobs."""
        return list(contexts.add([job.sequence for job in jobs], toks_per_batch))


class EmbedJob(CallJob):
    """Mean embeddings of sequences; the result is float32 [sequences, hidden_size]."""

    kind = "embeddings"
    merge = "embeddings"

    def __init__(self, sequences: Sequence[str]) -> None:
        self.sequences = list(sequences)
        super().__init__(sum(len(sequence) + 2 for sequence in self.sequences))

    def run(self, turbo: ContextModel, contexts: Contexts, jobs: Sequence[Any], toks_per_batch: int) -> list[Any]:
        """One call for the sequences of all jobs, each once."""
        number_of: dict[str, int] = {}
        for job in jobs:
            for sequence in job.sequences:
                number_of.setdefault(sequence, len(number_of))
        embeddings = embed(turbo, list(number_of), include=["mean"], toks_per_batch=toks_per_batch)
        means = []
        for embedding in embeddings:
            [mean] = (embedding.mean_representations or {}).values()
            means.append(mean)
        results = [torch.stack([means[number_of[sequence]] for sequence in job.sequences]) for job in jobs]
        return [one if bool(torch.isfinite(one).all()) else RequestError(500, NOT_FINITE) for one in results]


class GenerateJob(CallJob):
    """New residues for one sequence, as `TurboEsm.generate` draws them.

    Args:
        sequence: residues and masks.
        options: for this sequence alone.
        seed: of its samples.
        stored: whether the sequence is a stored context to append to.
    """

    kind = "generate"

    def __init__(self, sequence: str, residues: int, options: GenerationOptions, seed: int, stored: bool) -> None:
        self.sequence, self.options, self.stored = sequence, options, stored
        self.seeds = row_seeds(seed, options.num_return_sequences)
        self.merge = ("generate", repr(options), stored)
        refresh = 8 if options.refresh is None else options.refresh
        if options.max_new_tokens is not None:
            steps, per_step = options.max_new_tokens, refresh + 2
        else:
            chosen = sequence.lower().count("<mask>") if options.positions is None else len(options.positions)
            steps = math.ceil(chosen / options.per_step) * options.sweeps
            # A window around each chosen position, and now and then the whole protein.
            per_step = min(residues, chosen * (2 * refresh + 1)) + residues // (options.refresh_every or 8) + 1
        super().__init__(residues + options.num_return_sequences * steps * per_step)

    def run(self, turbo: ContextModel, contexts: Contexts, jobs: Sequence[Any], toks_per_batch: int) -> list[Any]:
        """One batch of the samples of all jobs."""
        sequences = [job.sequence for job in jobs]
        seeds = [seed for job in jobs for seed in job.seeds]
        made = generate(turbo, sequences, self.options, seeds, contexts if self.stored else None)
        size = self.options.num_return_sequences
        parts = [slice(begin, begin + size) for begin in range(0, size * len(jobs), size)]
        return [GenerationOutput(made.sequences[x], made.positions[x], made.log_probs[x]) for x in parts]
