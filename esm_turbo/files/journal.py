"""Results of an unfinished run, kept beside the file that they are for, so that a killed run can be resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esm_turbo.files.paths import keeps_its_content
from esm_turbo.files.writing import locked_parts, refuse_links

_FILE = "results.jsonl"
_log = logging.getLogger("esm_turbo")


class Journal:
    """JSON values by key, appended to a file one by one, each whole or not at all.

    A file of lines rather than a database: any network file system can append to it, and damage costs one line.

    What cannot be written, as on a full disk, is not kept: the run goes on, and only its resumption suffers. Lines that
    are damaged, as the last of a killed run may be, count as not there.

    Args:
        folder: of the file; it exists, and no other process writes into it.

    Attributes:
        folder: of the file.
        found: number of values that were asked for and that an earlier run has kept.
        added: number of values that were added.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / _FILE
        refuse_links(self._path, folder)
        self._values: dict[str, Any] = {}
        self._writes, self._ends = True, True
        self.found = self.added = 0
        if self._path.is_file():
            data = self._path.read_bytes()
            self._ends = data.endswith(b"\n")
            for line in data.splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    if entry["sha256"] == _digest(entry["value"]):
                        self._values[entry["key"]] = entry["value"]

    def is_of_another_run(self, stage: str) -> bool:
        """Whether earlier runs have kept values of a stage, see `key_of`, and none that this run has asked for."""
        return not self.found and any(key.startswith(f"{stage} ") for key in self._values)

    def get(self, key: str) -> Any | None:
        """The value of a key; None if there is none."""
        value = self._values.get(key)
        self.found += value is not None
        return value

    def add(self, key: str, value: Any) -> None:
        """Keep a value for later runs."""
        if not self._writes:
            return
        line = json.dumps({"key": key, "sha256": _digest(value), "value": value}, sort_keys=True) + "\n"
        try:
            with self._path.open("ab") as file:
                file.write((line if self._ends else "\n" + line).encode())
            self._ends = True
            self.added += 1
        except OSError as error:
            self._writes = False
            _log.warning("%s: cannot be written (%s): this run cannot be resumed", self._path, error.strerror or error)

    def remove(self) -> None:
        """Forget everything, once the results are where they belong."""
        self._values.clear()
        self._path.unlink(missing_ok=True)


def key_of(stage: str, *values: Any) -> str:
    """The key of a result.

    Args:
        stage: of the run.
        *values: everything that the result depends on, JSON values.
    """
    return f"{stage} {_digest(values)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def journal_beside(out: Path | None) -> Iterator[Journal | None]:
    """The journal of the run that writes `out`, in a hidden folder beside it; None without a file.

    The folder is locked, and goes when the journal is removed or has held nothing.

    Raises:
        FolderBusyError: (a ValueError) another process writes the same file.
        NotWritableError: the folder cannot be created.
        ValueError: a symbolic link is in its place.
    """
    if out is None or keeps_its_content(out):
        yield None
        return
    with locked_parts(out) as folder:
        yield Journal(folder)
