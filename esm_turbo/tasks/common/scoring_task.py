"""Tasks that score items, such as targets with candidates, by rows: in pieces that any process can run and keep."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from esm_turbo.files.journal import Journal
from esm_turbo.files.tabular import Tabular
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.tasks.common.checks import check_count
from esm_turbo.tasks.common.context_sources import ReadableSource, check_store
from esm_turbo.tasks.common.forwards import batch_tokens, context_config, resolve_arm, runs_on_cuda
from esm_turbo.tasks.common.memory import failure_reason
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.pieces import Plan, Runner, forward_cost, packed, piece_limit
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.resumable import run_resumable
from esm_turbo.tasks.common.row_engine import run_rows
from esm_turbo.tasks.common.rows import ItemRows, RowRun
from esm_turbo.tasks.common.run_info import run_settings

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class Item(Protocol):
    """What is scored: a protein, and what belongs to it."""

    @property
    def sequence(self) -> str:
        """Residues of the protein."""


class ItemScores(Tabular):
    """Scores of what belongs to one protein."""

    scores: Sequence[Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        raise NotImplementedError


ItemT = TypeVar("ItemT", bound=Item)
ScoresT = TypeVar("ScoresT", bound=ItemScores)


@dataclass(frozen=True)
class Scored(Generic[ScoresT]):
    """Result of an item.

    Attributes:
        scores: by arm.
        failed: why it could not be scored.
    """

    scores: dict[Arm, ScoresT]
    failed: str | None = None


@dataclass(frozen=True)
class ScoringTask(ABC, Generic[ItemT, ScoresT]):
    """A `ResumableTask` whose pieces are several items.

    Attributes:
        arms: in which every item is scored, at least one.
        refresh: number of residues that run again with each row.
        toks_per_batch: tokens per batch; None chooses by arm and device.
        store: holds contexts.
        reads_on: whether rows continue contexts, see `resolve_arm`.

    Raises:
        ValueError: `refresh` is no number from 0, or `store` is none.
    """

    arms: tuple[Arm, ...]
    refresh: int
    toks_per_batch: int | None
    store: ReadableSource | None
    reads_on: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_store(self.store)
        check_count("refresh", self.refresh, 0)

    @abstractmethod
    def rows(self, turbo: ContextModel, item: ItemT, arm: Arm) -> ItemRows[ScoresT]:
        """The rows of an item in an arm.

        Raises:
            ValueError: the item is invalid.
        """

    @abstractmethod
    def tokens(self, item: ItemT) -> int:
        """Tokens that run to score an item in an arm, about."""

    @abstractmethod
    def units(self, item: ItemT) -> int:
        """Predicted tokens of an item in an arm, by which progress is counted."""

    @abstractmethod
    def options(self) -> list[Any]:
        """What results depend on besides model, arms and items, as JSON values."""

    @abstractmethod
    def scores_from_dict(self, item: ItemT, values: Mapping[str, Any]) -> ScoresT:
        """Inverse of `to_dict` of the scores."""

    def run(
        self, turbo: ContextModel, pieces: Iterable[Sequence[ItemT]], progress: Progress
    ) -> Iterator[list[Scored[ScoresT]]]:
        """See `Task.run`."""
        done = total = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress("score", done, total)

        # One of the two is ahead: contexts of the next piece are read while rows of this one run.
        pieces, following = tee(pieces)
        results_of_items = run_rows(turbo, self._runs(turbo, following), store=self.store, advance=advance)
        with contextlib.closing(results_of_items) as found:
            for piece in pieces:
                done, total = 0, len(self.arms) * sum(map(self.units, piece))
                results = [Scored[ScoresT]({}) for _ in piece]
                for arm in self.arms:
                    for index, one in enumerate(islice(found, len(piece))):
                        if not isinstance(one, Exception):
                            results[index].scores[arm] = one
                        elif results[index].failed is None:
                            reason = failure_reason(piece[index].sequence, one, turbo.model.device)
                            results[index] = Scored(results[index].scores, reason)
                yield results

    def _runs(self, turbo: ContextModel, pieces: Iterable[Sequence[ItemT]]) -> Iterator[RowRun[ScoresT]]:
        for piece in pieces:
            for arm in self.arms:
                resolve_arm(turbo, arm, reads_on=self.reads_on)
                tokens = batch_tokens(self.toks_per_batch, arm, turbo.model.device)
                config = None if arm == "full" else context_config(turbo, arm)
                yield RowRun(self._rows_or_errors(turbo, piece, arm), config, tokens)

    def _rows_or_errors(
        self, turbo: ContextModel, items: Iterable[ItemT], arm: Arm
    ) -> Iterator[ItemRows[ScoresT] | Exception]:
        for item in items:
            try:
                yield self.rows(turbo, item, arm)
            except Exception as error:
                if not (isinstance(error, ValueError) or is_out_of_memory(error)):
                    raise
                yield error.with_traceback(None)

    def failed(self, piece: Sequence[ItemT], reason: str) -> list[Scored[ScoresT]]:
        """See `Task.failed`."""
        return [Scored({}, reason) for _ in piece]

    def has_failed(self, result: list[Scored[ScoresT]]) -> bool:
        """See `Task.has_failed`."""
        return any(one.failed is not None for one in result)

    def settings(self, turbo: ContextModel) -> Any:
        """See `ResumableTask.settings`."""
        return [run_settings(turbo, self.arms), *self.options()]

    def content(self, piece: Sequence[ItemT]) -> Any:
        """See `ResumableTask.content`."""
        return piece

    def to_json(self, result: list[Scored[ScoresT]]) -> Any:
        """See `ResumableTask.to_json`."""
        return [{arm: scores.to_dict() for arm, scores in one.scores.items()} for one in result]

    def from_json(self, piece: Sequence[ItemT], value: Any) -> list[Scored[ScoresT]]:
        """See `ResumableTask.from_json`."""
        return [
            Scored({arm: self.scores_from_dict(item, own) for arm, own in one.items()})
            for item, one in zip(piece, value, strict=True)
        ]


def limit_of(turbo: ContextModel, tokens: int, runner: Runner | None) -> int:
    """`piece_limit` of so many tokens where they run."""
    return piece_limit(tokens, on_cuda=runs_on_cuda(turbo, None if runner is None else runner.devices))


def score_items(
    turbo: ContextModel,
    task: ScoringTask[ItemT, ScoresT],
    items: Sequence[ItemT],
    limit: int | None = None,
    *,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    runner: Runner | None = None,
    plan: Plan | None = None,
    journal: Journal | None = None,
) -> dict[int, Scored[ScoresT]]:
    """Score items in pieces.

    Args:
        items: what is scored, in the order in which they form pieces.
        limit: tokens of a piece; None is `limit_of` all of them, or in this process all.
        names: of the items, for the plan.
        progress: called with stage `score`, see `Progress`.
        runner: where pieces are run; None is this process.
        plan: which pieces are run; None is all.
        journal: see `run_resumable`.

    Returns:
        The results, by index of the item.
    """
    tokens = [task.tokens(item) for item in items]
    if limit is None:
        limit = sum(tokens) if runner is None else limit_of(turbo, sum(tokens), runner)
    pieces = packed(range(len(items)), tokens, limit)
    if plan is not None:
        named = ["" for _ in items] if names is None else names
        costs = [forward_cost(turbo, size, len(item.sequence)) for size, item in zip(tokens, items, strict=True)]
        pieces = plan.choose(pieces, named, costs)
    scored = run_resumable(
        turbo,
        task,
        [[items[index] for index in piece] for piece in pieces],
        stage="score",
        units=[len(task.arms) * sum(task.units(items[index]) for index in piece) for piece in pieces],
        progress=progress,
        runner=runner,
        journal=journal,
    )
    return {
        index: one for piece, own in zip(pieces, scored, strict=True) for index, one in zip(piece, own, strict=True)
    }


@dataclass(frozen=True)
class ManyScores(Tabular, Generic[ScoresT]):
    """Scores of many items.

    Attributes:
        scores: one entry per item, in their order; None for one that failed.
        failed: by index of the item, why it could not be scored.
    """

    scores: tuple[ScoresT | None, ...]
    failed: Mapping[int, str]

    noun = "item"

    @classmethod
    def of(cls, scored: Mapping[int, Scored[ScoresT]]) -> Self:
        """Those in one arm, by index."""
        every = [scored[index] for index in range(len(scored))]
        return cls(
            tuple(next(iter(one.scores.values()), None) for one in every),
            {index: one.failed for index, one in enumerate(every) if one.failed is not None},
        )

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int) -> ScoresT:
        """Scores of an item.

        Raises:
            ValueError: it could not be scored.
        """
        found = self.scores[index]
        if found is None:
            raise ValueError(f"{self.noun} {index} was not scored: {self.failed[index % len(self)]}")
        return found

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per item, by its index, the rows of its scores."""
        for index, one in enumerate(self.scores):
            for row in () if one is None else one.rows():
                yield index, *row
