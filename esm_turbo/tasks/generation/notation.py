"""Notation of positions, constraints and new residues on the command line and in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from esm_turbo.tasks.generation.options import Allowed

# Far beyond the longest protein.
_MAX_POSITION = 1_000_000
_TOKEN = re.compile("<mask>|.")


def parse_positions(text: str) -> list[int]:
    """Parse positions such as `10-25,40`.

    Raises:
        ValueError: the notation is invalid.
    """
    positions: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"positions are written as 10-25,40 and counted from 1, got {text!r}")
        span = range(int(first), int(last or first) + 1)
        if span.stop > _MAX_POSITION:
            raise ValueError(f"no protein has a position {span.stop - 1:,}, got {part.strip()!r}")
        if not span or span[0] < 1:
            raise ValueError(f"positions are counted from 1 and given in ascending order, got {part.strip()!r}")
        positions += span
    return positions


def format_positions(positions: Sequence[int]) -> str:
    """Inverse of `parse_positions`, for positions in ascending order."""
    spans: list[list[int]] = []
    for position in positions:
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_allowed(items: Sequence[str]) -> Allowed:
    """Parse a constraint: `ACDE` for all positions, or `10=AG 12-15=HP` by position.

    Raises:
        ValueError: the notation is invalid, or mixes the two.
    """
    if not items:
        return None
    if len(items) == 1 and "=" not in items[0]:
        return items[0]
    by_position: dict[int, str] = {}
    for item in items:
        positions, equals, letters = item.partition("=")
        if not equals:
            raise ValueError(
                f"constraints are letters for all positions, or given as 10=AG 12-15=HP; got {' '.join(items)!r}"
            )
        by_position |= dict.fromkeys(parse_positions(positions), letters)
    return by_position


def residues_at(sequence: str, positions: Sequence[int]) -> str:
    """The residues at positions, counted from 1, of a sequence in which `<mask>` may stand for one."""
    tokens = _TOKEN.findall(sequence)
    return "".join(tokens[position - 1] for position in positions)
