"""Ctrl-C and SIGTERM: one line and exit code 130 or 143, whatever the process does at that moment.

Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_CONTINUES = "; the same command continues where it was"
_NOTHING = " before any result was kept"
# Until a lost interrupt is repeated, seconds: outside of the callback that lost it.
_REPEAT_AFTER = 0.01
_REPEATS = signal.SIGALRM


class Interrupts:
    """State of the interrupts of this process.

    Attributes:
        pending: an interrupt was raised. A library may have turned it into another exception.
        further: what becomes of the work of a command that can be continued.
    """

    def __init__(self) -> None:
        self.pending, self.further = False, ""
        self._reported = False
        self._number = signal.SIGINT

    def catch(self) -> None:
        """Count interrupts from now on. Where they are ignored, as in background jobs of a shell, they stay so."""
        for number in _WORDS:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(number, self._raise)
                signal.signal(_REPEATS, self._raise)
                sys.unraisablehook = self._repeat

    @contextlib.contextmanager
    def resume_by_command(self, kept: Callable[[], bool]) -> Iterator[None]:
        """Say of an interrupt in this block whether the same command continues.

        Args:
            kept: whether anything is kept for it.
        """
        try:
            yield
        except BaseException as error:
            if self.pending or isinstance(error, KeyboardInterrupt):
                self.further = _CONTINUES if kept() else _NOTHING
            raise

    def ignore(self) -> None:
        """Leave the rest of the process undisturbed: its results are complete."""
        for number in (*_WORDS, _REPEATS):
            signal.signal(number, signal.SIG_IGN)

    def report(self) -> int:
        """Print the line and return the exit code."""
        self._reported = True
        sys.stderr.write(self._line())
        self.further = ""
        return 128 + self._number

    def _line(self) -> str:
        return f"esm-turbo: {_WORDS[self._number]}{self.further}\n"

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.pending and number != _REPEATS:
            # Cleaning up takes too long for whoever presses the keys again.
            if not self._reported:
                os.write(sys.stderr.fileno(), self._line().encode())
            os._exit(128 + self._number)
        if number != _REPEATS:
            self._number = signal.Signals(number)
        while frame is not None:
            if frame.f_code is Interrupts._repeat.__code__:
                # Python drops what is raised here, too, and asks no hook.
                signal.setitimer(signal.ITIMER_REAL, _REPEAT_AFTER)
                return
            frame = frame.f_back
        if not self.pending:
            self.pending = True
            raise KeyboardInterrupt

    def _repeat(self, lost: Any) -> None:
        """Python drops exceptions in destructors and callbacks: an interrupt there is raised again a little later."""
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(lost)
            return
        self.pending = False
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_AFTER)


interrupts = Interrupts()
