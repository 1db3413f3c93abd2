"""Claims: which contexts each process is computing, so that several that fill one store share the work.

A claim is a temporary folder that its process keeps locked, see `files.writing`. The operating system releases the lock
of a process that dies, and the folder is then removed as any temporary. Where files cannot be locked there are no
claims: contexts are then computed twice at worst.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from esm_turbo.files.writing import held_temporaries, locked_temporary

_NAME = "claim"
_KEYS_FILE = "keys.json"


class Claims:
    """The claims in the folder of a store. Made and read under the store's lock, so that they are seen whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def claim(self, keys: Sequence[str]) -> Iterator[None]:
        """Claim contexts until the end of the block.

        Raises:
            OSError: the claim cannot be written.
        """
        with locked_temporary(self.folder, _NAME) as folder:
            (folder / _KEYS_FILE).write_text(json.dumps(list(keys)), encoding="utf-8")
            yield

    def of_others(self) -> set[str]:
        """Keys that other living processes have claimed, or other stores of this one."""
        keys: set[str] = set()
        for folder in held_temporaries(self.folder, _NAME):
            # Its process may just have removed it.
            with contextlib.suppress(OSError, ValueError, TypeError):
                keys.update(json.loads((folder / _KEYS_FILE).read_text(encoding="utf-8")))
        return keys
