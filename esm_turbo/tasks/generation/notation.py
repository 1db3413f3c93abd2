"""Notation of positions, constraints and new residues on the command line and in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.tasks.generation.options import Allowed

# Far beyond the longest protein.
_MAX_POSITION = 1_000_000
_TOKEN = re.compile("<mask>|.")
# A position of a template, with the number of its repeats: of PROSITE's patterns what has a length.
_ELEMENT = re.compile(r"([A-Z]|\[[A-Z]+\]|\{[A-Z]+\})(?:\(([0-9]{1,3})\))?-?", re.ASCII)


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
        ValueError: the notation is invalid, mixes the two, or names a position twice.
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
        own = dict.fromkeys(parse_positions(positions), letters)
        if twice := by_position.keys() & own.keys():
            raise ValueError(f"position {min(twice)} is constrained twice, in {' '.join(items)!r}")
        by_position |= own
    return by_position


def parse_template(text: str, anything: str = STANDARD_RESIDUES) -> list[str]:
    """Parse a template such as `GX[KR]XXP`, in PROSITE's notation: `x` is any residue, `{P}` any but P, `x(2)` two.

    Args:
        text: one element per position; hyphens between them may be left out.
        anything: residues that `x` stands for.

    Returns:
        The residues that each position may have.

    Raises:
        ValueError: the notation is invalid, or a position has no residue left.
    """
    letters: list[str] = []
    at, upper = 0, "".join(text.split()).upper()
    while at < len(upper):
        match = _ELEMENT.match(upper, at)
        if match is None:
            raise ValueError(
                f"templates are written as GX[KR]XXP, where X is any residue, [KR] one of these and {{P}} none of"
                f" these, got {text!r}"
            )
        given = match[1].strip("[]{}")
        if match[1] == "X":
            given = anything
        elif match[1].startswith("{"):
            given = "".join(letter for letter in anything if letter not in given)
        if not given:
            raise ValueError(f"the template {text!r} leaves no residue at position {len(letters) + 1}")
        if (times := int(match[2] or 1)) < 1:
            raise ValueError(f"the template {text!r} repeats an element {times} times")
        letters += [given] * times
        at = match.end()
    return letters


def tokens_of(sequence: str) -> list[str]:
    """The residues of a sequence, in which `<mask>` may stand for one."""
    found: list[str] = _TOKEN.findall(sequence)
    return found


def residues_at(sequence: str, positions: Sequence[int]) -> str:
    """The residues at positions, counted from 1, of a sequence in which `<mask>` may stand for one."""
    tokens = tokens_of(sequence)
    return "".join(tokens[position - 1] for position in positions)
