"""Counts of look-ups by where contexts were found, kept per process and added up in the store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esm_turbo.files.kinds import is_store
from esm_turbo.files.writing import replacing

USAGE_FILE = "usage.jsonl"
FOUND = ("device", "host", "disk")
_COUNTS = (*FOUND, "missed", "damaged")
_COMPACT_BYTES = 1 << 16


class Usage:
    """Counts of one process, in addition to those in the store.

    Counts are approximate: those that a killed process has not written are lost, and a store that cannot be written
    keeps none.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / USAGE_FILE
        self._new = dict.fromkeys(_COUNTS, 0)

    def count(self, what: str, contexts: int = 1) -> None:
        """Counts contexts that were found on the `device`, `host` or `disk`, or that were `missed` or `damaged`."""
        self._new[what] += contexts

    def flush(self) -> None:
        """Adds the counts of this process to the store's, if there is a store."""
        if not any(self._new.values()) or not is_store(self.path.parent):
            return
        line = json.dumps(self._new) + "\n"
        if self.path.is_symlink():
            return
        with contextlib.suppress(OSError), self.path.open("ab", buffering=0) as file:
            # One write per line, so that lines of processes that append at the same time do not mix.
            file.write(line.encode())
            self._new = dict.fromkeys(_COUNTS, 0)

    def compact(self) -> None:
        """Replaces the lines of a long file by their sum; only for the store's writer."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > _COMPACT_BYTES:
                line = json.dumps(self._stored()) + "\n"
                with replacing(self.path, inside=True) as temporary:
                    temporary.write_text(line, encoding="utf-8")

    def totals(self) -> dict[str, int]:
        """Counts of this process and all that others have written."""
        return _sum(self._stored(), self._new)

    def _stored(self) -> dict[str, int]:
        totals = dict.fromkeys(_COUNTS, 0)
        lines: list[bytes] = []
        with contextlib.suppress(OSError):
            lines = self.path.read_bytes().splitlines()
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                totals = _sum(totals, json.loads(line))
        return totals


def rates(totals: Mapping[str, int]) -> dict[str, Any]:
    """The counts, and the fractions of look-ups found in each place; None without look-ups."""
    looked_up = sum(totals[name] for name in (*FOUND, "missed"))
    shares = {name: totals[name] / looked_up if looked_up else None for name in FOUND}
    found = (looked_up - totals["missed"]) / looked_up if looked_up else None
    return {"looked_up": looked_up, **totals, "hit_rate": found, "hit_rates": shares}


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a[name] + int(b.get(name, 0)) for name in _COUNTS}
