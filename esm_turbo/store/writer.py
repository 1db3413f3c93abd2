"""The lock of a store, and what each writer does first when it has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from esm_turbo.files.writing import only_writer
from esm_turbo.store.files import Partition, StoreFiles
from esm_turbo.store.flat import ContextSpec


class Writer:
    """Writes into a store, one process at a time.

    Args:
        files: of the store.
        timeout: seconds to wait for another process that is writing.
    """

    def __init__(self, files: StoreFiles, timeout: float) -> None:
        self.files = files
        self.timeout = timeout
        self._swept = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock during the block.

        Raises:
            FolderBusyError: (a ValueError) another process was writing for all of `timeout`.
        """
        with only_writer(self.files.folder, timeout=self.timeout, keep=True):
            yield

    @contextlib.contextmanager
    def partition(self, spec: ContextSpec) -> Iterator[Partition]:
        """Holds the lock during the block; what killed writers left is removed, and there is a partition.

        Raises:
            ValueError: the store belongs to another model.
            FolderBusyError: as of `locked`.
            OSError: writing failed, for example because the disk is full.
        """
        with self.locked():
            partition = self.files.make_partition(spec)
            self.sweep_once()
            self.files.discard_unfinished()
            yield partition

    def sweep_once(self) -> None:
        """Removes, once, the temporary files of killed writers."""
        if not self._swept and self.files.folder.exists():
            self.files.remove_temporaries()
            self._swept = True
