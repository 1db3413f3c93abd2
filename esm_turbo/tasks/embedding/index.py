"""The index of a folder of embeddings: `index.tsv`, with the files of each identifier."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from esm_turbo.files.safe_text import cell, from_cell
from esm_turbo.files.writing import refuse_links, replacing

_HEADER = "id\tresidues\tembedding\tcache\tchecksum"
_COLUMNS = 4


class EmbeddingIndex:
    """`index.tsv`: the files of each identifier; rows are appended.

    Attributes:
        damaged: whether any line could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = False
        self._rows: dict[str, str] = {}
        self._staged: dict[str, str] = {}
        # By file, in lower case: some systems take names that only differ in that for the same.
        self._identifiers: defaultdict[str, set[str]] = defaultdict(set)
        content = path.read_bytes() if path.exists() else b""
        # Rows of a batch count together: while they are written, a zero byte stands before them, see `_append`.
        content = content.partition(b"\0")[0]
        # Anything after the last line break was being written when the process died.
        self._whole_bytes = content.rfind(b"\n") + 1
        found = {}
        for number, line in enumerate(content[: self._whole_bytes].splitlines()):
            text = line.decode(errors="replace")
            row = text.rpartition("\t")[0]
            if number and row.count("\t") == _COLUMNS - 1 and text == _with_checksum(row):
                found[from_cell(row.partition("\t")[0])] = row
            else:
                self.damaged |= text != _HEADER
        self._keep(found)

    @property
    def rows(self) -> Iterator[list[str]]:
        """Identifier, number of residues, and the files of the embedding and the cache."""
        for row in self._rows.values():
            identifier, *others = row.split("\t")
            yield [from_cell(identifier), *others]

    def identifiers(self, file: str) -> set[str]:
        """Identifiers of this file, and of files that only differ in case."""
        return self._identifiers.get(file.lower(), set())

    def add(self, identifier: str, residues: int, files: Sequence[str]) -> None:
        """Add a row to the next `commit`, unless the index already has it."""
        row = "\t".join([cell(identifier), str(residues), *files])
        if self._rows.get(identifier) != row:
            self._staged[identifier] = row

    def commit(self) -> None:
        """Append the staged rows to the file."""
        if not self._staged:
            return
        lines = [*map(_with_checksum, self._staged.values()), ""]
        if not self._whole_bytes:
            lines.insert(0, _HEADER)
        self._whole_bytes = _append(self.path, self._whole_bytes, "\n".join(lines).encode())
        self._keep(self._staged)
        self._staged = {}

    def drop(self, files: Iterable[str]) -> None:
        """Remove the rows of all that these files are of."""
        dropped = {identifier for file in files for identifier in self._identifiers.pop(file.lower(), ())}
        if dropped:
            self._rows = {name: row for name, row in self._rows.items() if name not in dropped}
            self.sort([])

    def sort(self, last: Sequence[str]) -> None:
        """Sort the rows so that the file does not depend on interruptions.

        Args:
            last: identifiers whose rows come last, in this order.
        """
        moved = {name: self._rows[name] for name in last if name in self._rows}
        self._rows = {name: row for name, row in self._rows.items() if name not in moved} | moved
        text = "\n".join([_HEADER, *map(_with_checksum, self._rows.values()), ""]).encode()
        if not (self._rows or self._whole_bytes):
            return
        if not self.path.exists() or text != self.path.read_bytes():
            with replacing(self.path, inside=True) as temporary:
                temporary.write_bytes(text)
        self._whole_bytes = len(text)

    def _keep(self, rows: Mapping[str, str]) -> None:
        self._rows |= rows
        for identifier, row in rows.items():
            for name in row.split("\t")[2:]:
                self._identifiers[name.lower()].add(identifier)


def _with_checksum(row: str) -> str:
    """A row as in the file: the last cell is the first eight hexadecimal digits of the SHA-256 of the others."""
    return f"{row}\t{hashlib.sha256(row.encode()).hexdigest()[:8]}"


def _append(path: Path, size: int, content: bytes) -> int:
    """Write after the first `size` bytes of a file, replacing the rest, and return the new size."""
    refuse_links(path, path.parent)
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        file.truncate(size)
        try:
            # The first byte comes last, and is zero until then.
            for start, part in ((size + 1, content[1:]), (size, content[:1])):
                file.seek(start)
                if file.write(part) != len(part):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # With only half of a batch's rows in the index, the rest would be batched differently.
            file.truncate(size)
            raise
        return size + len(content)
