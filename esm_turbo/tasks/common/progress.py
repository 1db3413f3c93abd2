"""Progress of long runs: the callback that tasks call and the command line draws as a bar."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback that is told how far a run has come.

    A run has one or more stages. Each stage has a name and counts its own units, such as proteins or residues.
    """

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """Report progress.

        Args:
            stage: name of the stage, such as `embed`.
            done: units finished so far; grows from call to call within a stage.
            total: units of the whole stage.
        """


class StageProgress:
    """One stage of a run, which counts its units and reports them.

    Args:
        progress: the callback; None reports to nobody.
        stage: name of the stage.
        total: units of the stage.
    """

    def __init__(self, progress: Progress | None, stage: str, total: int) -> None:
        self.progress = progress or silent
        self.stage = stage
        self.total = total
        self.done = 0
        self.reported = -1

    def within(self, stage: str, done: int, total: int, /) -> None:
        """A `Progress` of units that are counted later, when what they belong to is finished."""
        self._report(self.done + done)

    def advance(self, units: int) -> None:
        """Report that `units` more are done; 0 shows the stage before its first unit is."""
        self.done += units
        self._report(self.done)

    def _report(self, done: int) -> None:
        if done > self.reported:
            self.reported = done
            self.progress(self.stage, done, self.total)


def part_of(
    progress: Progress | None, *, stage: str | None = None, name: str = "", start: int = 0, total: int | None = None
) -> Progress | None:
    """The callback for a run that is part of a longer one.

    Args:
        progress: the longer run's callback; with None there is none for the part.
        stage: name to report in place of the part's own.
        name: of the part, which begins those of its stages.
        start: units that were done before the part.
        total: units of the longer run; None keeps the part's own total.
    """
    if progress is None:
        return None

    def report(own_stage: str, done: int, own_total: int, /) -> None:
        progress(name + (stage or own_stage), start + done, own_total if total is None else total)

    return report


def silent(stage: str, done: int, total: int, /) -> None:
    """The `Progress` that reports to nobody."""
