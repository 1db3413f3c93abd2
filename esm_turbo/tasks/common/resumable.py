"""Runs in pieces whose results are kept, so that a run that was stopped continues where it was."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from esm_turbo.files.journal import Journal, key_of
from esm_turbo.files.tabular import counted
from esm_turbo.tasks.common.pieces import InProcessRunner, Runner, Task
from esm_turbo.tasks.common.progress import Progress

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")
_Piece = TypeVar("_Piece", contravariant=True)
_Result = TypeVar("_Result")
_log = logging.getLogger("esm_turbo")


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
        if found:
            done = f"{len(found):,} {'is' if len(found) == 1 else 'are'} done"
            _log.info("continuing a run that was stopped: of %s, %s", counted(len(pieces), "part"), done)
        elif journal.is_of_another_run and not journal.added:
            _log.info("what a stopped run has kept is of other inputs, options or versions: all is computed again")
    left = [number for number in range(len(pieces)) if number not in found]
    runner = InProcessRunner(turbo) if runner is None else runner
    rest, sizes = [pieces[number] for number in left], [units[number] for number in left]
    for index, result in runner.run(task, rest, stage=stage, units=sizes, progress=progress):
        number = left[index]
        found[number] = result
        if journal is not None and not task.has_failed(result):
            journal.add(keys[number], task.to_json(result))
    return [found[number] for number in range(len(pieces))]
