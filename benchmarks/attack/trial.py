"""Common parts of all trials: commands and calls in forks, and the faults in how one ended."""

from __future__ import annotations

import mmap
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from esm_turbo.cli import app
from esm_turbo.cli.console import PROGRAM, quiet, say

SECONDS = 120.0
"""After which a command hangs: a hundred times what it takes."""
MOST_BYTES = 2**30
"""Physical memory that a command on a few small proteins may take beyond that of the process it was forked from."""
# Of `ru_maxrss`.
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
OTHER_NUMBERS = 3
"""Exit code of a trial's own call of the library whose result is not the expected one; what it prints last says how."""
_INTERNAL = re.compile(r"\b(Runtime|Memory|Type|Key|Index|Attribute|Assertion|UnboundLocal|ZeroDivision)Error\b")


@dataclass(frozen=True)
class Finding:
    """Something that must not happen.

    Attributes:
        category: one of few, such as `traceback` or `different`.
        what: happened, in one line.
    """

    category: str
    what: str


@dataclass(frozen=True)
class Outcome:
    """The end of a command or call.

    Attributes:
        code: exit code; negative for a signal.
        out: standard output.
        err: standard error.
        hung: it was still running after `SECONDS`, and was killed.
        bytes: peak of physical memory beyond what the fork began with.
    """

    code: int
    out: str
    err: str
    hung: bool
    bytes: int


@dataclass(frozen=True)
class Running:
    """A command or call that was started.

    Attributes:
        pid: of its process.
        begin: of its time.
        streams: ends of the pipes from its standard output and standard error.
        resident: memory shared with the process, which writes the bytes of physical memory there that it began with.
    """

    pid: int
    begin: float
    streams: tuple[int, int]
    resident: mmap.mmap

    def wait(self, seconds: float | None = None) -> Outcome:
        """Wait for its end; at most so long from its start, or `SECONDS`."""
        seconds = SECONDS if seconds is None else seconds
        texts = dict.fromkeys(self.streams, b"")
        hung, open_streams = False, set(self.streams)
        while open_streams:
            for stream in select.select(open_streams, (), (), 0.1)[0]:
                data = os.read(stream, 2**16)
                texts[stream] += data
                if not data:
                    os.close(stream)
                    open_streams.remove(stream)
            if not hung and time.monotonic() - self.begin > seconds:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        out, err = (texts[stream].decode(errors="replace") for stream in self.streams)
        beyond = usage.ru_maxrss * _PEAK_UNIT - int.from_bytes(self.resident[:], sys.byteorder)
        return Outcome(os.waitstatus_to_exitcode(status), out, err, hung, max(0, beyond))


def _resident() -> int:
    """Physical memory of this process, bytes; where it cannot be read, its peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT


def start(folder: Path, function: Callable[[], int]) -> Running:
    """Run a call in a fork, in a folder; its result is the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Pipes, because limits on files must not reach what the command prints.
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    begin, resident = time.monotonic(), mmap.mmap(-1, 8)
    pid = os.fork()
    if pid:
        os.close(out_end)
        os.close(err_end)
        return Running(pid, begin, (out, err), resident)
    resident[:] = _resident().to_bytes(8, sys.byteorder)
    code = 70
    try:
        # PyTorch makes its thread pool anew after a fork: here, and not when threads that load weights race to it.
        torch.set_num_threads(1)
        for end, stream in ((out_end, 1), (err_end, 2)):
            os.dup2(end, stream)
            os.close(end)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Lines of standard error are seen at once, as in a process of its own.
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
        os.chdir(folder)
        code = function()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def call(folder: Path, function: Callable[[], int]) -> Outcome:
    """Run a call in a fork, in a folder, and wait for it."""
    return start(folder, function).wait()


def command(
    folder: Path,
    arguments: Sequence[str],
    before: Callable[[], object] | None = None,
    seconds: float | None = None,
) -> Outcome:
    """Run a command of `esm-turbo` in a fork, in a folder.

    Args:
        folder: where it runs.
        arguments: paths relative to the folder.
        before: called in the fork first, to disturb it.
        seconds: after which it hangs; None is `SECONDS`.
    """
    return start_command(folder, arguments, before).wait(seconds)


def start_command(folder: Path, arguments: Sequence[str], before: Callable[[], object] | None = None) -> Running:
    """Start a command of `esm-turbo` in a fork, see `command`."""

    def run() -> int:
        if before is not None:
            before()
        app.main(arguments)
        raise AssertionError("the command line did not exit")

    return start(folder, run)


def library(folder: Path, function: Callable[[], int]) -> Outcome:
    """Run a call of the library in a fork, in a folder; the errors that it promises end it as those of a command."""

    def run() -> int:
        with quiet(False):
            try:
                return function()
            except (ValueError, OSError) as error:
                say(f"error: {error}")
                return 2

    return call(folder, run)


def faults(outcome: Outcome) -> list[Finding]:
    """Faults in how a command ended, whatever it was given."""
    found = []
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if outcome.hung:
        return [Finding("hang", f"still running after {SECONDS:g} s")]
    if outcome.code not in (0, 1, 2):
        end = f"signal {-outcome.code}" if outcome.code < 0 else f"exit code {outcome.code}"
        found.append(Finding("exit", f"ended with {end}: {last[:200]}"))
    if "Traceback" in outcome.err + outcome.out:
        found.append(Finding("traceback", last[:300]))
    elif strange := [line for line in lines if not line.startswith(f"{PROGRAM}: ")]:
        found.append(Finding("message", f"not of one line, or not its own: {strange[0][:200]}"))
    errors = [line for line in lines if line.startswith(f"{PROGRAM}: error: ")]
    if outcome.code in (1, 2) and not errors:
        found.append(Finding("message", f"exit code {outcome.code} without an error; last line: {last[:200]}"))
    for line in errors:
        if re.search(r"(: ?|\(\))$", line):
            found.append(Finding("message", f"without a reason: {line[:200]}"))
        if match := _INTERNAL.search(line):
            found.append(Finding("message", f"an internal {match[0]}: {line[:250]}"))
    if outcome.bytes > MOST_BYTES:
        found.append(Finding("memory", f"took {outcome.bytes / 2**30:.1f} GiB"))
    return found


def library_faults(outcome: Outcome) -> list[Finding]:
    """Faults in how a call of the library ended, other results among them."""
    if outcome.code == OTHER_NUMBERS:
        last = outcome.out.splitlines()[-1:] or ["other numbers, without an error"]
        return [Finding("different", last[0])]
    return faults(outcome)


def about(tried: str, findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say what was tried."""
    return [Finding(one.category, f"{tried}: {one.what}") for one in findings]
