"""Runs in pieces whose results are kept, so that a run that was stopped continues where it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from esm_turbo.files.journal import Journal, key_of
from esm_turbo.tasks.common.ahead import Ahead
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.pieces import InProcessRunner, Runner, Task
from esm_turbo.tasks.common.progress import Progress

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

PieceT = TypeVar("PieceT")
ProteinT = TypeVar("ProteinT")
ResultT = TypeVar("ResultT")
_Piece = TypeVar("_Piece", contravariant=True)
_Result = TypeVar("_Result")


class ResumableTask(Task[_Piece, _Result], Protocol[_Piece, _Result]):
    """A `Task` whose results can be kept as JSON values."""

    def settings(self, turbo: ContextModel) -> Any:
        """Everything that results depend on besides the pieces, as JSON values."""

    def content(self, piece: _Piece) -> Any:
        """Everything of a piece that its result depends on, as JSON values."""

    def to_json(self, result: _Result) -> Any:
        """A result, as JSON values."""

    def from_json(self, piece: _Piece, value: Any) -> _Result:
        """Inverse of `to_json`."""


class _Scores(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


ScoresT = TypeVar("ScoresT", bound=_Scores)


@dataclass(frozen=True)
class Scored(Generic[ScoresT]):
    """Result of a protein, or of a part of one.

    Attributes:
        scores: by arm.
        failed: why it could not be scored.
    """

    scores: dict[Arm, ScoresT]
    failed: str | None = None


class ScoringTask(Generic[ProteinT, ScoresT]):
    """What all tasks share whose pieces are several proteins and whose results are a `Scored` of each.

    Attributes:
        arms: in which every protein is scored, at least one.
    """

    arms: tuple[Arm, ...]

    def begin(
        self, turbo: ContextModel, piece: Sequence[ProteinT], number: int, progress: Progress, ahead: Ahead
    ) -> Iterator[tuple[int, ScoresT | str]]:
        """Begin to score a piece in the arm of this number.

        Returns:
            Scores, or why there are none, by index of the protein; `ahead` reads the first contexts that they need.
        """
        raise NotImplementedError

    def run(
        self, turbo: ContextModel, pieces: Iterable[Sequence[ProteinT]], progress: Progress
    ) -> Iterator[list[Scored[ScoresT]]]:
        def begin(
            piece: Sequence[ProteinT], number: int
        ) -> tuple[Sequence[ProteinT], int, Iterator[tuple[int, ScoresT | str]]]:
            return piece, number, self.begin(turbo, piece, number, progress, ahead)

        with Ahead(turbo.model.device) as ahead:
            scores: list[dict[Arm, ScoresT]] = []
            failed: dict[int, str] = {}
            calls = (partial(begin, piece, number) for piece in pieces for number in range(len(self.arms)))
            for piece, number, found in ahead.in_turn(calls):
                if number == 0:
                    scores, failed = [{} for _ in piece], {}
                for index, one in found:
                    if isinstance(one, str):
                        failed.setdefault(index, one)
                    else:
                        scores[index][self.arms[number]] = one
                if number == len(self.arms) - 1:
                    yield [Scored(own, failed.get(index)) for index, own in enumerate(scores)]

    def failed(self, piece: Sequence[ProteinT], reason: str) -> list[Scored[ScoresT]]:
        return [Scored({}, reason) for _ in piece]

    def has_failed(self, result: list[Scored[ScoresT]]) -> bool:
        return any(one.failed is not None for one in result)

    def to_json(self, result: list[Scored[ScoresT]]) -> Any:
        return [{arm: scores.to_dict() for arm, scores in one.scores.items()} for one in result]


def run_resumable(
    turbo: ContextModel,
    task: ResumableTask[PieceT, ResultT],
    pieces: Sequence[PieceT],
    *,
    stage: str,
    units: Sequence[int],
    progress: Progress | None = None,
    runner: Runner | None = None,
    journal: Journal | None = None,
) -> list[ResultT]:
    """The results of all pieces, in their order: those that the journal has, and of the others as they are run.

    A result with a record that failed is not kept: another time, there may be more memory.

    Args:
        turbo: the model.
        task: what is done with a piece.
        pieces: the pieces.
        stage: name of the run for `progress`.
        units: size of each piece, by which progress is counted.
        progress: see `Progress`; what was kept is not counted.
        runner: where pieces are run; None is this process.
        journal: of this output; None keeps nothing.
    """
    found: dict[int, ResultT] = {}
    keys: list[str] = []
    if journal is not None:
        settings = task.settings(turbo)
        for number, piece in enumerate(pieces):
            keys.append(key_of(settings, task.content(piece)))
            value = journal.get(keys[number])
            if value is not None:
                found[number] = task.from_json(piece, value)
    left = [number for number in range(len(pieces)) if number not in found]
    runner = InProcessRunner(turbo) if runner is None else runner
    rest, sizes = [pieces[number] for number in left], [units[number] for number in left]
    for index, result in runner.run(task, rest, stage=stage, units=sizes, progress=progress):
        number = left[index]
        found[number] = result
        if journal is not None and not task.has_failed(result):
            journal.add(keys[number], task.to_json(result))
    return [found[number] for number in range(len(pieces))]
