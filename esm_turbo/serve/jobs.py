"""Requests as the engine runs them.

A `RowJob` consists of rows, of which the engine takes as many at a time as a batch has room for, so that a long request
does not keep short ones waiting. A `WholeJob` runs at once, together with others of its kind.
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

import numpy as np
import torch
from torch import Tensor

from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.errors import RequestError
from esm_turbo.serve.rows import Rows
from esm_turbo.tasks.common.arms import prefill_ids
from esm_turbo.tasks.common.options import Arm, CandidateFill, MarginalMethod
from esm_turbo.tasks.embedding.embed import embed
from esm_turbo.tasks.generation.generate import GenerationOptions, GenerationOutput, generate
from esm_turbo.tasks.generation.sampling import row_seeds
from esm_turbo.tasks.scoring.score import CandidateScore, Scores, masked_rows
from esm_turbo.tasks.scoring.targets import Target, cached_target
from esm_turbo.tasks.variants.score import VariantScores, added_up, window_rows
from esm_turbo.tasks.variants.substitutions import Substitutions

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
class Stretch:
    """Rows of a job that extend one context.

    Attributes:
        rows: makes the rows of these numbers.
        width: tokens per row.
        count: number of rows.
        keep: takes the numbers of rows and their predictions, [n, vocab_size].
    """

    rows: Callable[[Tensor], Rows]
    width: int
    count: int
    keep: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Taken:
    """Rows that the engine took from a job, and where their predictions go."""

    job: RowJob
    rows: Rows
    numbers: Tensor
    keep: Callable[[Tensor, Tensor], None]

    def put(self, predicted: Tensor) -> None:
        """Give the job its predictions, float32 [n, vocab_size]."""
        if not bool(torch.isfinite(predicted).all()):
            raise RequestError(500, NOT_FINITE)
        self.keep(self.numbers, predicted)
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
        self._stretches: Iterator[Stretch] | None = None
        self._stretch: Stretch | None = None
        self._next = 0

    @abstractmethod
    def stretches(self, turbo: ContextModel, contexts: Contexts) -> Iterator[Stretch]:
        """Its rows by context; each context is computed when its first row is about to be taken."""

    @abstractmethod
    def result(self, turbo: ContextModel) -> Any:
        """Its result, once all rows have run."""

    def take(self, turbo: ContextModel, contexts: Contexts, tokens: int) -> Taken:
        """The next rows of one context: as many as have `tokens` tokens, at least one."""
        if self._stretches is None:
            self._stretches = self.stretches(turbo, contexts)
        if self._stretch is None or self._next == self._stretch.count:
            self._stretch, self._next = next(self._stretches), 0
        stretch, begin = self._stretch, self._next
        self._next = min(stretch.count, begin + max(1, tokens // stretch.width))
        self.left -= self._next - begin
        numbers = torch.arange(begin, self._next)
        return Taken(self, stretch.rows(numbers), numbers, stretch.keep)


class ScoreJob(RowJob):
    """Scores of candidates after a target, as `TurboEsm.score` computes them.

    Args:
        target: token ids of its residues.
        candidates: token ids of each candidate.
        arm: of the model's preset.
        place: see `tasks.scoring.score.score`, and so is `refresh`.
    """

    kind = "score"

    def __init__(
        self, target: Sequence[int], candidates: Sequence[Sequence[int]], arm: Arm, place: CandidateFill, refresh: int
    ) -> None:
        self.target = list(target)
        self.candidates = [list(candidate) for candidate in candidates]
        self.arm, self.place = arm, place
        self.refresh = min(refresh, len(self.target))
        lengths = list(map(len, self.candidates))
        contexts = len(set(lengths)) if place == "masked" else 1
        tokens = sum(length * (self.refresh + length + 1) for length in lengths)
        super().__init__(tokens + contexts * (len(self.target) + max(lengths)), rows=sum(lengths))
        self._log_probs: list[list[float]] = [[] for _ in self.candidates]

    def stretches(self, turbo: ContextModel, contexts: Contexts) -> Iterator[Stretch]:
        """A context per length of candidates."""
        target = cached_target(turbo, self.target, self.arm, self.place, self.refresh, contexts)
        prefix = self.target[len(self.target) - self.refresh :]
        for length in sorted(set(map(len, self.candidates))):
            group = [index for index, ids in enumerate(self.candidates) if len(ids) == length]
            tokens = len(group) * length * (len(prefix) + length + 1)
            key = ("score", bytes(self.target), length if self.place == "masked" else 0, self.refresh)
            cache = contexts.ready(key, partial(_context_of, target, length))
            cache = contexts.as_read_fastest(key, cache, tokens)
            yield self._stretch_of(turbo, key, cache, prefix, group)

    def _stretch_of(
        self, turbo: ContextModel, key: Hashable, cache: TurboKVCache, prefix: list[int], group: list[int]
    ) -> Stretch:
        candidates = torch.tensor([self.candidates[index] for index in group])
        count, length = candidates.shape

        def rows(numbers: Tensor) -> Rows:
            input_ids, at, _ = masked_rows(turbo.codes, prefix, candidates, numbers)
            return Rows(key, cache, input_ids, at)

        def keep(numbers: Tensor, predicted: Tensor) -> None:
            residues = candidates.flatten()[numbers]
            values = predicted.gather(1, residues[:, None])[:, 0].tolist()
            for number, value in zip(numbers.tolist(), values, strict=True):
                self._log_probs[group[number // length]].append(value)

        return Stretch(rows, len(prefix) + length + 1, count * length, keep)

    def result(self, turbo: ContextModel) -> Scores:
        """As of `TurboEsm.score`."""
        scores = tuple(
            CandidateScore(turbo.codes.decode(ids), tuple(values))
            for ids, values in zip(self.candidates, self._log_probs, strict=True)
        )
        preset = turbo.model.base_model.turbo_config.name
        return Scores(scores, self.arm, preset, self.place, self.refresh, turbo.name)


def _context_of(target: Target, length: int) -> TurboKVCache:
    """What candidates of a number of residues read."""
    cache: TurboKVCache = target.run(length).options["past_key_values"]
    return cache


class VariantsJob(RowJob):
    """Scores of variants of a protein, as `TurboEsm.score_variants` computes them.

    Args:
        wild_type: its residues.
        ids: its tokens, `<cls>` and `<eos>` included.
        names: of the variants.
        parsed: their substitutions.
        arm: of the model's preset.
        method: see `tasks.variants.score.score_variants`, and so is `refresh`.
    """

    kind = "variants"

    def __init__(
        self,
        wild_type: str,
        ids: Sequence[int],
        names: Sequence[str],
        parsed: Substitutions,
        arm: Arm,
        method: MarginalMethod,
        refresh: int,
    ) -> None:
        self.wild_type, self.ids, self.names, self.parsed = wild_type, list(ids), list(names), parsed
        self.arm, self.method = arm, method
        self.residues = len(self.ids) - 2
        self.refresh = min(refresh, self.residues - 1) if method == "masked" else 0
        positions, self._row = np.unique(parsed.index, return_inverse=True)
        self._positions = torch.from_numpy(positions)
        super().__init__(len(positions) * (self.refresh + 1) + len(self.ids), rows=len(positions))
        self._predicted: list[Tensor] = []

    def stretches(self, turbo: ContextModel, contexts: Contexts) -> Iterator[Stretch]:
        """One, on the protein with `<eos>`."""
        width, count = self.refresh + 1, len(self._positions)
        key = ("variants", bytes(self.ids))
        cache = contexts.ready(key, partial(prefill_ids, turbo, self.ids, self.arm, contexts))
        if turbo.model.device.type == "cpu":
            cache = contexts.as_read_fastest(key, cache, width * count)

        def rows(numbers: Tensor) -> Rows:
            positions = self._positions[numbers]
            made = window_rows(turbo.codes, self.ids, self.residues, positions, self.method, self.refresh)
            return Rows(key, cache, *made)

        yield Stretch(rows, width, count, lambda numbers, predicted: self._predicted.append(predicted))

    def result(self, turbo: ContextModel) -> VariantScores:
        """As of `TurboEsm.score_variants`."""
        scores = added_up(turbo.codes, self.names, self.parsed, self._row, torch.cat(self._predicted))
        preset = turbo.model.base_model.turbo_config.name
        return VariantScores(scores, self.wild_type, self.method, self.arm, preset, self.refresh, turbo.name)


class WholeJob(Job):
    """A job that runs in one call, together with others of equal `merge`."""

    merge: Hashable

    @abstractmethod
    def run(self, turbo: ContextModel, contexts: Contexts, jobs: Sequence[Any], toks_per_batch: int) -> list[Any]:
        """The results of `jobs`, itself among them, all of equal `merge`."""


class ContextJob(WholeJob):
    """Storing the contexts of sequences; the result is their keys."""

    kind = "contexts"
    merge = "contexts"

    def __init__(self, sequence: str) -> None:
        self.sequence = sequence
        super().__init__(len(sequence) + 1)

    def run(self, turbo: ContextModel, contexts: Contexts, jobs: Sequence[Any], toks_per_batch: int) -> list[Any]:
        """One call for the sequences of all jobs."""
        return list(contexts.add([job.sequence for job in jobs], toks_per_batch))


class EmbedJob(WholeJob):
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


class GenerateJob(WholeJob):
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
