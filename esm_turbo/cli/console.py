"""What the commands have in common on a terminal: progress, results, tables, and quiet libraries.

Progress and warnings go to standard error, results to standard output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

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
from rich.table import Table
from rich.text import Text

from esm_turbo.proteins.limits import LongProteinWarning
from esm_turbo.tasks.common.progress import Progress, silent

PROGRAM = "esm-turbo"
_debug: ContextVar[bool] = ContextVar("debug", default=False)
# Results that go to a file or a pipe are not cut to the width of a terminal that is not there.
_PIPE_WIDTH = 120


def say(message: str) -> None:
    """Writes one line to standard error."""
    print(f"{PROGRAM}: {one_line(message)}", file=sys.stderr)


def one_line(message: object) -> str:
    """A message without its line breaks."""
    return " ".join(str(message).split())


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Keeps what libraries print off standard error, and shows this package's own warnings in one line each.

    Args:
        debug: let everything through.
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
                warnings.simplefilter("always", LongProteinWarning)
                warnings.showwarning = _show_warning  # type: ignore[assignment]
            yield
    finally:
        _debug.reset(token)
        log.removeHandler(handler)
        log.setLevel(level)


def quiet_transformers() -> None:
    """Switches off the bars and reports that transformers prints when it loads a model, unless debugging."""
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


def _show_warning(message: Warning | str, *_: Any) -> None:
    say(f"warning: {message}")


class _Rate(ProgressColumn):
    """Units done a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s")


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Progress]:
    """A progress bar on standard error, with rate and time left; nothing where that is no terminal.

    Args:
        unit: what is counted.

    Yields:
        The callback for a task; each stage has a bar of its own.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    bar = ProgressDisplay(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def advance(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total, unit=unit)
        bar.update(tasks[stage], completed=done, total=total)

    with bar:
        yield advance


@contextlib.contextmanager
def working(message: str) -> Iterator[None]:
    """Shows what is going on where it cannot be counted; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    with console.status(message) if console.is_terminal else contextlib.nullcontext():
        yield


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """A table, its first column to the left and the others, numbers, to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def show(*parts: object, to_json: str | None, result: Mapping[str, Any]) -> None:
    """Prints a command's result, and writes it for machines where that was asked for.

    Args:
        *parts: for readers: text, or what rich can print.
        to_json: a file, `-` for standard output, where nothing else is then printed, or None.
        result: JSON values.
    """
    if to_json == "-":
        print(json.dumps(result, indent=2))
        return
    console = Console(soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPE_WIDTH)
    for part in parts:
        if isinstance(part, str):
            print(part)
        else:
            console.print(part)
    if to_json is not None:
        from esm_turbo.files.artifacts import replacing

        with replacing(Path(to_json)) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def width() -> int:
    """Columns for a result on standard output."""
    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else _PIPE_WIDTH


def bytes_text(count: float) -> str:
    """A number of bytes for readers, such as `1.9 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
