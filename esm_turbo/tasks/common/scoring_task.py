"""Tasks that score items, such as targets with candidates, by rows: in pieces that any process can run and keep."""

from __future__ import annotations

import contextlib
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.files.identity import exact_identity
from esm_turbo.files.journal import Journal, key_of
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.tasks.common.checks import check_count
from esm_turbo.tasks.common.context_sources import ReadableSource, check_store
from esm_turbo.tasks.common.forwards import batch_tokens, context_config, resolve_arm, runs_on_cuda
from esm_turbo.tasks.common.homologs import row_arm
from esm_turbo.tasks.common.memory import too_large
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.pieces import InProcessRunner, Plan, Runner, forward_cost, packed, piece_limit
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.common.row_engine import run_rows
from esm_turbo.tasks.common.rows import ItemRows, RowRun
from esm_turbo.tasks.common.run_info import run_settings
from esm_turbo.tasks.common.same_model import run_on_model

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


class Item(Protocol):
    """What is scored: a protein, and what belongs to it."""

    @property
    def sequence(self) -> str:
        """Residues of the protein."""


@dataclass(frozen=True)
class ItemScores(Tabular):
    """Scores of what belongs to one protein."""

    scores: tuple[Any, ...]

    def ranking(self) -> list[int]:
        """Indices of the scores, best first."""
        raise NotImplementedError

    def best_first(self) -> list[Sequence[object]]:
        """`rows`, best first."""
        rows = list(self.rows())
        return [rows[index] for index in self.ranking()]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        raise NotImplementedError


ItemT = TypeVar("ItemT", bound=Item)
ScoresT = TypeVar("ScoresT", bound=ItemScores)
_log = logging.getLogger("esm_turbo")


@dataclass(frozen=True)
class Scored(Generic[ScoresT]):
    """Result of an item.

    Attributes:
        scores: by arm.
        failed: why it could not be scored.
        numbers: what was scored here of what belongs to the item, by its numbers; all of it if that is None.
    """

    scores: dict[Arm, ScoresT]
    failed: str | None = None
    numbers: Sequence[int] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Scored[ScoresT]]) -> Scored[ScoresT]:
        """The result of an item from its parts, in the order of the numbers of what they hold."""
        failed = next((one.failed for one in parts if one.failed is not None), None)
        if failed is not None:
            return cls({}, failed)
        if len(parts) == 1:
            return parts[0]
        held = [enumerate(one.numbers or ()) for one in parts]
        order = sorted((number, part, at) for part, own in enumerate(held) for at, number in own)
        scores = {
            arm: replace(first, scores=tuple(parts[part].scores[arm].scores[at] for _, part, at in order))
            for arm, first in parts[0].scores.items()
        }
        return cls(scores, None, [number for number, *_ in order])


@dataclass(frozen=True)
class ScoringTask(ABC, Generic[ItemT, ScoresT]):
    """A `Task` whose pieces are several items, and whose results a `Journal` can keep.

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
    refresh: int = DEFAULT_REFRESH
    toks_per_batch: int | None = None
    store: ReadableSource | None = None
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
        """Tokens that run to score an item in an arm, those of its contexts among them, about."""

    def parts(self, item: ItemT, limit: int) -> Iterable[tuple[ItemT, Sequence[int] | None]]:
        """An item in parts of up to so many tokens, each with the numbers of what it holds; None for all."""
        return [(item, None)]

    @abstractmethod
    def units(self, item: ItemT) -> int:
        """Predicted tokens of an item in an arm, by which progress is counted."""

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
                            lacks_memory, residues = is_out_of_memory(one), len(piece[index].sequence)
                            reason = too_large(residues, turbo.model.device, one) if lacks_memory else str(one)
                            results[index] = Scored(results[index].scores, reason)
                yield results

    def _runs(self, turbo: ContextModel, pieces: Iterable[Sequence[ItemT]]) -> Iterator[RowRun[ScoresT]]:
        for piece in pieces:
            for arm in self.arms:
                resolve_arm(turbo, arm, reads_on=self.reads_on)
                yield self.row_run(turbo, self._rows_or_errors(turbo, piece, arm), arm)

    def row_run(self, turbo: ContextModel, items: Iterable[ItemRows[ScoresT] | Exception], arm: Arm) -> RowRun[ScoresT]:
        """A run of the rows of items in an arm."""
        tokens = batch_tokens(self.toks_per_batch, row_arm(turbo, arm), turbo.model.device)
        return RowRun(items, None if arm == "full" else context_config(turbo, arm), tokens)

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
        """Everything that results depend on besides the items, as JSON values."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return [run_settings(turbo, self.arms), {name: options[name] for name in options if name != "store"}]

    def to_json(self, result: list[Scored[ScoresT]]) -> Any:
        """The results of a piece, none of which has failed, as JSON values."""
        return [{arm: scores.to_dict() for arm, scores in one.scores.items()} for one in result]

    def from_json(self, piece: Sequence[ItemT], value: Any) -> list[Scored[ScoresT]]:
        """Inverse of `to_json`."""
        return [
            Scored({arm: self.scores_from_dict(item, one[arm]) for arm in self.arms})
            for item, one in zip(piece, value, strict=True)
        ]


def score_item(
    turbo: ContextModel, task: ScoringTask[ItemT, ScoresT], item: ItemT, progress: Progress | None = None
) -> ScoresT:
    """Score an item in the only arm of a task, in this process and within the caller's `call_on`.

    Raises the error of an item that cannot be scored.
    """
    [arm] = task.arms
    rows = task.rows(turbo, item, arm)
    run = task.row_run(turbo, [rows], arm)
    counter = StageProgress(progress, "score", sum(group.predictions for group in rows.groups))
    [found] = run_rows(turbo, [run], store=task.store, advance=counter.advance)
    if isinstance(found, Exception):
        raise found
    return found


def score_items(
    turbo: ContextModel,
    task: ScoringTask[ItemT, ScoresT],
    items: Sequence[ItemT],
    *,
    in_pieces: bool = True,
    names: Sequence[str] = (),
    stage: str = "score",
    progress: Progress | None = None,
    runner: Runner | None = None,
    plan: Plan | None = None,
    journal: Journal | None = None,
) -> dict[int, Scored[ScoresT]]:
    """Score items in pieces of up to a cost of `piece_limit`, in batches filled across the items of a piece.

    Args:
        items: what is scored, in the order in which they form pieces; a large one may be divided.
        in_pieces: False runs all in one piece, which is faster where nothing is kept or shared.
        names: of the items, for the plan.
        stage: name of what is done, for those who wait.
        progress: called with the stage, see `Progress`.
        runner: where pieces are run; None is this process.
        plan: which pieces are run; None is all.
        journal: of this output, which has the results of pieces that are done, and keeps those of others as they are
            run. A piece with an item that failed is not kept: another time, there may be more memory. None keeps
            nothing.

    Returns:
        The results, by index of the item; with a plan, of those that have any here.

    Raises:
        ValueError: the journal has results of this stage, but of other items, options or versions, or the model changes
            during a run in pieces.
    """
    begun = exact_identity(turbo.model) if in_pieces else None
    parts: list[tuple[int, ItemT, Sequence[int] | None]] = [(number, one, None) for number, one in enumerate(items)]
    per_token = [len(task.arms) * forward_cost(turbo, 1, len(one.sequence)) for one in items]
    tokens = list(map(task.tokens, items))
    limit = total = sum(map(operator.mul, tokens, per_token))
    if in_pieces:
        on_cuda = runs_on_cuda(turbo, None if runner is None else runner.devices)
        limit = piece_limit(sum(tokens), total, on_cuda=on_cuda)
        parts = [
            (number, *part)
            for number, item in enumerate(items)
            for part in task.parts(item, limit // per_token[number])
        ]
    costs = [task.tokens(part) * per_token[number] for number, part, _ in parts]
    pieces = packed(range(len(parts)), costs, limit)
    if plan is not None:
        pieces = plan.choose(pieces, [f"{names[number]} {list(own or ())}" for number, _, own in parts], costs)
    items_of = [[parts[index][1] for index in piece] for piece in pieces]
    keys, scored = _kept(turbo, task, items_of, journal, stage)
    left = [number for number in range(len(pieces)) if number not in scored]
    units = [len(task.arms) * sum(map(task.units, items_of[number])) for number in left]
    runner = InProcessRunner(turbo) if runner is None else runner
    rest = [items_of[number] for number in left]
    run = run_on_model(turbo, runner, task, rest, stage=stage, units=units, progress=progress, begun=begun)
    for place, result in run:
        number = left[place]
        scored[number] = result
        if journal is not None and not task.has_failed(result):
            journal.add(keys[number], task.to_json(result))
    found: dict[int, list[Scored[ScoresT]]] = {}
    for number, piece in enumerate(pieces):
        for index, one in zip(piece, scored[number], strict=True):
            item, _, numbers = parts[index]
            found.setdefault(item, []).append(replace(one, numbers=numbers))
    return {number: Scored.joined(own) for number, own in found.items()}


def _kept(
    turbo: ContextModel,
    task: ScoringTask[ItemT, ScoresT],
    pieces: Sequence[Sequence[ItemT]],
    journal: Journal | None,
    stage: str,
) -> tuple[list[str], dict[int, list[Scored[ScoresT]]]]:
    """The keys of pieces in a journal, and the results that it has, by number of the piece.

    Raises:
        ValueError: it has results of this stage, but of another run.
    """
    found: dict[int, list[Scored[ScoresT]]] = {}
    if journal is None:
        return [], found
    settings = task.settings(turbo)
    keys = [key_of(stage, settings, piece) for piece in pieces]
    for number, key in enumerate(keys):
        if (value := journal.get(key)) is not None:
            found[number] = task.from_json(pieces[number], value)
    if found:
        done = f"{len(found):,} {'is' if len(found) == 1 else 'are'} done"
        parts = counted(len(pieces), "part")
        _log.info("continuing a run that was stopped: of %s of the stage '%s', %s", parts, stage, done)
    elif journal.is_of_another_run(stage):
        raise ValueError(
            f"{journal.folder}: holds results of a run that was stopped, of other inputs, options or versions; repeat"
            " its command to continue it, give another --out, or remove this folder to begin again"
        )
    return keys, found


@dataclass(frozen=True)
class ManyScores(Tabular, Generic[ScoresT]):
    """Scores of many items.

    Attributes:
        scores: one entry per item, in their order; None for one that failed.
        failed: by index of the item, why it could not be scored.
    """

    scores: tuple[ScoresT | None, ...]
    failed: Mapping[int, str]

    noun: ClassVar[str]
    scored_noun: ClassVar[str]

    def __repr__(self) -> str:
        scored = sum(len(one.scores) for one in self.scores if one is not None)
        sizes = counted(len(self), self.noun), counted(scored, self.scored_noun)
        return named(self, *sizes, f"{len(self.failed):,} failed")

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

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return [self.noun, *next((one.columns() for one in self.scores if one is not None), ())]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per item, by its index, the rows of its scores."""
        for index, one in enumerate(self.scores):
            for row in () if one is None else one.rows():
                yield index, *row
