"""Ctrl-C: one line and exit code 130, whatever the process does at that moment. Needs only the standard library."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 130
_LINE = "esm-turbo: interrupted\n"
# Until a lost interrupt is repeated, seconds: outside of the callback that lost it.
_REPEAT_AFTER = 0.01


class Interrupts:
    """What has happened to the interrupts of this process.

    Attributes:
        pending: an interrupt was raised. A library may have turned it into another exception.
    """

    def __init__(self) -> None:
        self.pending = False
        self._reported = False

    def catch(self) -> None:
        """Count interrupts from now on. Where they are ignored, as in background jobs of a shell, they stay so."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._raise)
            sys.unraisablehook = self._repeat

    def ignore(self) -> None:
        """Leave the rest of the process undisturbed: its results are complete."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def report(self) -> int:
        """Print the line and return the exit code."""
        self._reported = True
        sys.stderr.write(_LINE)
        return EXIT_CODE

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            # Cleaning up takes too long for whoever presses the keys again.
            if not self._reported:
                os.write(sys.stderr.fileno(), _LINE.encode())
            os._exit(EXIT_CODE)
        self.pending = True
        raise KeyboardInterrupt

    def _repeat(self, lost: Any) -> None:
        """Python drops exceptions in destructors and callbacks: an interrupt there is raised again a little later."""
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(lost)
            return
        self.pending = False
        main = threading.main_thread().ident
        threading.Timer(_REPEAT_AFTER, signal.pthread_kill, [main, signal.SIGINT]).start()


interrupts = Interrupts()
