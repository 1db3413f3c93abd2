"""Notation of protein variants, such as `H24C`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from esm_turbo.proteins.fasta import CHAIN_BREAK, PARTICULAR_RESIDUES, STANDARD_RESIDUES

_POSITION_DIGITS = 18
_SUBSTITUTION = re.compile(r"([A-Z])(-?[0-9]+)([A-Z])", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Substitution:
    """One residue in place of another.

    Attributes:
        wild_type: the residue of the wild type.
        index: its index, from 0.
        mutant: the residue that replaces it.
    """

    wild_type: str
    index: int
    mutant: str


class MisnumberedError(ValueError):
    """A variant names a residue or a position that its protein does not have.

    Attributes:
        found: what is wrong, without the likely cause.
    """

    def __init__(self, found: str, cause: str | None = None) -> None:
        super().__init__(found if cause is None else f"{found}; {cause}")
        self.found = found


def is_variant(text: str) -> bool:
    """True if a text has the notation of a variant, such as `H24C` or `H24C:E26K`."""
    return all(_SUBSTITUTION.fullmatch(part.strip()) for part in text.strip().split(":"))


def parse_variant(variant: str, wild_type: str, first_position: int = 1) -> list[Substitution]:
    """Parse a variant such as `H24C`, or `H24C:E26K` for several substitutions.

    Args:
        variant: wild-type residue, position and mutant residue of each substitution.
        wild_type: residues of the protein, upper case.
        first_position: position of the protein's first residue.

    Raises:
        MisnumberedError: (a ValueError) a position lies outside the protein, or the protein has another residue there.
        ValueError: the notation is invalid, or a position appears twice.
    """
    return _parsed(variant, wild_type, first_position, [variant])


def _parsed(variant: str, wild_type: str, first_position: int, alike: Iterable[str]) -> list[Substitution]:
    """`parse_variant`; an error names the likely cause, given all variants that are numbered alike."""
    try:
        return parse_without_cause(variant, wild_type, first_position)
    except MisnumberedError as error:
        raise MisnumberedError(error.found, likely_cause(alike, wild_type, first_position)) from None


def likely_cause(variants: Iterable[str], wild_type: str, first_position: int) -> str:
    """The reason why variants do not fit their protein: another numbering that fits, or none does.

    Args:
        variants: numbered alike, those that fit as well; what is no variant does not count.
        wild_type: residues of the protein.
        first_position: position of its first residue, by which some do not fit.
    """
    named = Counter(
        (match[1].upper(), int(match[2]))
        for variant in variants
        for part in variant.split(":")
        if (match := _SUBSTITUTION.fullmatch(part.strip())) and len(match[2]) <= _POSITION_DIGITS
    )
    places: dict[str, list[int]] = {}
    for index, residue in enumerate(wild_type):
        places.setdefault(residue, []).append(index)
    fitting = Counter[int]()
    for (residue, position), times in named.items():
        for index in places.get(residue, ()):
            fitting[position - index] += times
    (best, most), (_, next_most) = [*fitting.most_common(2), (0, 0), (0, 0)][:2]
    total = named.total()
    if 2 * most <= total:
        return f"no numbering fits{' most of them' if total > 1 else ''}; another protein or isoform?"
    if best == first_position:
        return f"numbered from {first_position}, {most:,} of {total:,} residues fit"
    if most == next_most:
        return f"is {first_position} the position of the first residue? `first_position` sets it"
    share = "it fits" if total == 1 else f"{f'{most:,} of' if most < total else 'all'} {total:,} residues fit"
    return f"is {first_position} the position of the first residue? With `first_position` {best}, {share}"


def parse_without_cause(variant: str, wild_type: str, first_position: int) -> list[Substitution]:
    """`parse_variant`, whose errors leave out the likely cause: of many variants it is looked for once."""
    substitutions: list[Substitution] = []
    for part in variant.strip().split(":"):
        match = _SUBSTITUTION.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{variant!r} is not a variant: write the residue, its position and the mutant, such as H24C; several"
                " as H24C:E26K"
            )
        index = int(match[2]) - first_position
        if not 0 <= index < len(wild_type):
            numbers = f"{first_position} to {first_position + len(wild_type) - 1}"
            raise MisnumberedError(f"{variant!r}: position {match[2]} lies outside the protein, {numbers}")
        residue, mutant = match[1].upper(), match[3].upper()
        if mutant not in PARTICULAR_RESIDUES:
            raise ValueError(f"{variant!r}: the mutant must be one of {PARTICULAR_RESIDUES}, got {mutant}")
        if wild_type[index] != residue:
            raise MisnumberedError(f"{variant!r}: residue {match[2]} is {wild_type[index]}")
        if any(other.index == index for other in substitutions):
            raise ValueError(f"{variant!r} names position {match[2]} twice")
        substitutions.append(Substitution(residue, index, mutant))
    return substitutions


@dataclass(frozen=True)
class Substitutions:
    """The substitutions of many variants, as arrays [substitutions], in the order of the variants.

    Attributes:
        variant: number of the variant that each belongs to.
        index: index of the residue, from 0.
        wild_type: residue of the wild type, one letter.
        mutant: residue that replaces it.
    """

    variant: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    wild_type: npt.NDArray[np.str_]
    mutant: npt.NDArray[np.str_]

    @classmethod
    def parse(cls, variants: Sequence[str], wild_type: str, first_position: int = 1) -> Substitutions:
        """Parse many variants at once, as `parse_variant` parses one.

        Raises:
            ValueError: one of them is invalid.
        """
        parts = [variant.strip().split(":") for variant in variants]
        matches = [_SUBSTITUTION.fullmatch(part.strip()) for own in parts for part in own]
        number = np.repeat(np.arange(len(parts)), [len(own) for own in parts])
        rows = [("", "0", "") if match is None else match.groups() for match in matches]
        texts = np.array(rows, dtype=np.str_).reshape(-1, 3)
        letters = np.char.upper(texts[:, ::2])
        # Longer positions than any protein has, but for zeros, lie outside of it; 64 bits hold the others.
        digits = np.char.lstrip(np.char.lstrip(texts[:, 1], "-"), "0")
        too_long = np.char.str_len(digits) > _POSITION_DIGITS
        index = np.where(too_long, "0", texts[:, 1]).astype(np.int64) - first_position
        residues = np.array(list(wild_type))
        inside = ~too_long & (index >= 0) & (index < len(residues))
        good = (
            inside
            & (residues[np.where(inside, index, 0)] == letters[:, 0])
            & np.isin(letters[:, 1], list(PARTICULAR_RESIDUES))
        )
        by_place = np.lexsort((index, number))
        twice = (np.diff(number[by_place]) == 0) & (np.diff(index[by_place]) == 0)
        wrong = [*number[~good], *number[by_place][1:][twice]]
        if wrong:
            _parsed(variants[min(wrong)], wild_type, first_position, variants)
            raise AssertionError(f"{variants[min(wrong)]!r} is valid after all")
        return cls(number, index, letters[:, 0], letters[:, 1])

    @classmethod
    def all(cls, wild_type: str) -> Substitutions:
        """All substitutions by one of the 20 standard residues, as `all_substitutions` names them."""
        residues, mutants = np.array(list(wild_type)), np.array(list(STANDARD_RESIDUES))
        index, column = np.nonzero((residues[:, None] != mutants) & (residues[:, None] != CHAIN_BREAK))
        return cls(np.arange(len(index)), index, residues[index], mutants[column])


RESIDUE_COLUMNS = ("position", "wild_type_residue", "mutant_residue")
"""Columns of `parts_of` in tables."""


def parts_of(variant: str) -> tuple[int | str, str, str]:
    """Position, residue of the wild type and mutant residue of a valid variant; several are joined as in `24:26`."""
    parts = [part.strip() for part in variant.upper().split(":")]
    positions = [int(part[1:-1]) for part in parts]
    position = positions[0] if len(parts) == 1 else ":".join(map(str, positions))
    return position, ":".join(part[0] for part in parts), ":".join(part[-1] for part in parts)


def all_substitutions(wild_type: str, first_position: int = 1) -> list[str]:
    """All substitutions by one of the 20 standard residues, such as `H24A`, position by position."""
    return [
        f"{residue}{position}{mutant}"
        for position, residue in enumerate(wild_type, start=first_position)
        for mutant in STANDARD_RESIDUES
        if mutant != residue and residue != CHAIN_BREAK
    ]
