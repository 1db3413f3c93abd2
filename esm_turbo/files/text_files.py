"""Read text files, plain or gzip."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator

_GZIP_MAGIC = b"\x1f\x8b"

NO_SUCH_FILE = "there is no such file; check the path"
"""The reason why a missing file cannot be read, in the same words for all kinds of files."""


class DamagedGzipError(ValueError):
    """A gzip file is damaged; the message is the reason, without the file's name."""


def text_lines(path: str | os.PathLike[str], newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, plain or gzip, which is recognised by its first bytes, not by its name.

    Args:
        path: the file; a byte order mark is left out.
        newline: as of `open`.

    Raises:
        UnicodeDecodeError: the file is not text.
        DamagedGzipError: the gzip file is truncated or damaged.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP_MAGIC else raw
        try:
            with io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline) as text:
                yield from text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedGzipError(
                f"the gzip file is truncated or damaged ({error}); copy or download it again"
            ) from error
