"""Shapes of CUDA graphs: those of a call are padded to the next ones, so that few graphs serve many calls."""

from __future__ import annotations

from typing import NamedTuple

# With more tokens the device takes longer than the host, and padding costs more than a graph saves.
_MAX_TOKENS = 4096
MAX_COLUMNS = 4096
# A step that grows rows launches more and computes less.
MAX_GROWING_TOKENS = 16384
_MIN_ROWS, _MIN_TOKENS, MIN_COLUMNS = 8, 8, 128


class Bucket(NamedTuple):
    """Shapes of a graph.

    Attributes:
        rows: of the extension, 1 or at least 8: fewer take as long as 8.
        tokens: per row.
        contexts: rows of the cache: `rows`, or 1 that all share, or up to `rows` that rows name.
        columns: of the cache.
        named: whether rows name their contexts.
    """

    rows: int
    tokens: int
    contexts: int
    columns: int
    named: bool = False


def bucket_of(rows: int, tokens: int, contexts: int, columns: int, named: bool = False) -> Bucket | None:
    """The smallest bucket for these shapes; None if a graph would not make them faster."""
    if named and contexts > rows:
        # All contexts of a cache are copied.
        return None
    rows = _rounded_up_rows(rows)
    tokens, columns = rounded_up(tokens, _MIN_TOKENS), rounded_up(columns, MIN_COLUMNS)
    if rows * tokens > _MAX_TOKENS or columns > MAX_COLUMNS:
        return None
    if named:
        return Bucket(rows, tokens, min(rows, _power(contexts, 4)), columns, named)
    return Bucket(rows, tokens, 1 if contexts == 1 else rows, columns)


def rounded_up(number: int, step: int) -> int:
    """The next multiple of `step` up to four of them, then the next power of two or one and a half times one."""
    if number <= 4 * step:
        return max(1, -(-number // step)) * step
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if number <= power * 3 // 4 else power


def _power(number: int, base: int) -> int:
    """The smallest power of `base` that is no less."""
    power = 1
    while power < number:
        power *= base
    return power


def _rounded_up_rows(rows: int) -> int:
    """One row, or a power of two from eight on."""
    return 1 if rows == 1 else max(_MIN_ROWS, _power(rows, 2))


def rounded_up_growing_rows(rows: int) -> int:
    """A power of two up to eight rows, then closer: with many rows the device is what takes the time."""
    return _power(rows, 2) if rows <= _MIN_ROWS else rounded_up(rows, _MIN_ROWS)
