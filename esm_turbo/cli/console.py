"""The terminal, as all commands use it: progress, results, and quiet libraries.

Progress and warnings go to standard error, results to standard output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressDisplay
from rich.text import Text

from esm_turbo.files.paths import keeps_its_content
from esm_turbo.files.safe_text import visible, without_controls
from esm_turbo.files.writing import replacing
from esm_turbo.tasks.common.progress import Progress

PROGRAM = "esm-turbo"
_debug: ContextVar[bool] = ContextVar("debug", default=False)
_worded: ContextVar[Callable[[str], str]] = ContextVar("worded", default=str)
# Width of results that go to a file or a pipe, where there is no terminal to ask.
_PIPE_WIDTH = 120
# Seconds to the first line of progress, and from one to the next, where no bar can be shown.
_FIRST_LINE, _NEXT_LINE = 10, 30
# Stages with a bar, the last ones.
_BARS = 6


def say(message: str) -> None:
    """Write one line to standard error."""
    print(f"{PROGRAM}: {one_line(_worded.get()(message))}", file=sys.stderr)


def one_line(message: object) -> str:
    """A message without its line breaks and other control characters."""
    return without_controls(" ".join(str(message).split()))


@contextlib.contextmanager
def wording(worded: Callable[[str], str]) -> Iterator[None]:
    """Pass what `say` is given through a function first."""
    token = _worded.set(worded)
    try:
        yield
    finally:
        _worded.reset(token)


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Silence the warnings of libraries, and show those of this package in one line each, equal ones once.

    Args:
        debug: show everything.
    """
    log = logging.getLogger("esm_turbo")
    handler = _OneLine()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    token = _debug.set(debug)
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = _warnings_shown()
            yield
    finally:
        _debug.reset(token)
        log.removeHandler(handler)
        log.setLevel(level)


def quiet_transformers() -> None:
    """Disable the progress bars and reports that transformers prints when it loads a model, unless debugging."""
    if _debug.get():
        return
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity(logging.ERROR)


class _OneLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        say(prefix + record.getMessage())


def _warnings_shown() -> Callable[..., None]:
    """In place of `warnings.showwarning`: shows the categories that this package defines, and each message once."""
    shown = set[str]()

    def show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if category.__module__.partition(".")[0] == "esm_turbo" and str(message) not in shown:
            shown.add(str(message))
            say(f"warning: {message}")

    return show_warning


class _Rate(ProgressColumn):
    """Units per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s")


def _time_left(stages: Mapping[str, int | None], stage: str, units: float, rate: float) -> str:
    """Such as `8 min left with background, then rescore`: of a stage, and of those after it of which it is known.

    Args:
        stages: as of `progress_bar`.
        stage: that runs.
        units: left of it.
        rate: units per second.
    """
    names = list(stages)
    after = names[names.index(stage) + 1 :] if stage in stages else []
    alike = {name: size for name in after if (size := stages[name]) is not None}
    text = f"{_duration((units + sum(alike.values())) / rate)} left"
    text += f" with {' and '.join(alike)}" if alike else ""
    others = [name for name in after if name not in alike]
    return text + (f", then {' and '.join(others)}" if others else "")


class _Left(TimeRemainingColumn):
    """Time left, see `_time_left`; time that was needed, of a stage that is finished."""

    def __init__(self, stages: Mapping[str, int | None]) -> None:
        super().__init__(elapsed_when_finished=True)
        self.stages = stages

    def render(self, task: Task) -> Text:
        if task.finished or not task.speed or task.remaining is None:
            return super().render(task)
        return Text(_time_left(self.stages, task.description, task.remaining, task.speed), style="progress.remaining")


class _Lines:
    """Progress as a line now and then, for a file or a pipe. Runs of a few seconds print none."""

    def __init__(self, unit: str, stages: Mapping[str, int | None]) -> None:
        self.unit, self.stages = unit, stages
        self.stage: str | None = None
        self.since = self.last = time.monotonic()
        self.due = self.since + _FIRST_LINE

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        now = time.monotonic()
        if stage != self.stage:
            # A stage whose beginning is reported begins then, another one when the previous one ended.
            self.stage, self.since = stage, self.last if done else now
        self.last = now
        if now < self.due or done >= total:
            return
        self.due = now + _NEXT_LINE
        line = f"{stage}: {done:,} of {total:,} {self.unit}"
        rate = done / max(now - self.since, 1e-9)
        if rate:
            left = _time_left(self.stages, stage, total - done, rate)
            line += f", {rate:,.{0 if rate >= 10 else 1}f} per second, {left}"
        say(line)


def _duration(seconds: float) -> str:
    """Such as `40 s`, `3 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"


@contextlib.contextmanager
def progress_bar(unit: str, stages: Mapping[str, int | None] | None = None) -> Iterator[Progress]:
    """Show progress on standard error, with rate and time left: bars, or now and then a line if it is no terminal.

    Args:
        unit: in the plural.
        stages: names of all stages in their order, each with its number of units if they take as long as those of the
            stage before it; None tells nothing of what follows a stage.

    Yields:
        The callback for a task; each stage has a bar of its own.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(unit, stages or {})
        return
    bar = ProgressDisplay(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        _Rate(),
        _Left(stages or {}),
        console=console,
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def advance(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            if len(tasks) == _BARS:
                bar.remove_task(tasks.pop(next(iter(tasks))))
            tasks[stage] = bar.add_task(stage, total=total, unit=unit)
        bar.update(tasks[stage], completed=done, total=total)

    with bar:
        yield advance


@contextlib.contextmanager
def working(message: str) -> Iterator[None]:
    """Show a spinner on standard error while something runs; nothing if that is not a terminal."""
    console = Console(stderr=True)
    with console.status(message) if console.is_terminal else contextlib.nullcontext():
        yield


def show(*parts: object, to_json: str | None, result: Mapping[str, Any]) -> None:
    """Print the result of a command, and write it as JSON if asked for.

    Args:
        *parts: what to print: text, or renderables of rich.
        to_json: a file; `-` for standard output, where nothing else is then printed; or None.
        result: JSON values.
    """
    if to_json == "-":
        print(json.dumps(result, indent=2))
        return
    console = Console(soft_wrap=False, width=width())
    for part in parts:
        if isinstance(part, str):
            # Only a terminal would act on control characters; other programs may read what was written.
            print("\n".join(map(visible, part.split("\n"))) if console.is_terminal else part)
        else:
            console.print(part)
    if to_json is not None:
        save_text(Path(to_json), json.dumps(result, indent=2) + "\n")


def save_text(path: Path, text: str) -> None:
    """Write results to a file, see `save`."""

    def write(out: Path | TextIO) -> None:
        if isinstance(out, Path):
            with replacing(out) as temporary:
                temporary.write_text(text, encoding="utf-8")
        else:
            out.write(text)

    save(write, path)


def save(write: Callable[[Path | TextIO], None], path: Path) -> None:
    """Write results to a file, and say if it replaced one.

    If that fails, as on a full disk, they are printed, so that they are not lost.

    Args:
        write: writes them to a path or an open file.
        path: the file.

    Raises:
        OSError: the file cannot be written.
    """
    with replacement_said(path):
        try:
            write(path)
        except OSError:
            write(sys.stdout)
            raise


@contextlib.contextmanager
def replacement_said(path: Path) -> Iterator[None]:
    """Say after this block, which writes a file, if it replaced one."""
    replaces = path.is_file() and not keeps_its_content(path)
    yield
    if replaces:
        say(f"replaced {path}")


def width() -> int:
    """Width of results on standard output, in columns."""
    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else _PIPE_WIDTH
