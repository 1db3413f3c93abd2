"""Notation of protein variants, such as `H24C`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from esm_turbo.proteins.fasta import STANDARD_RESIDUES, normalize_sequence

_SUBSTITUTION = re.compile(r"([A-Z])(-?[0-9]+)([A-Z])", re.IGNORECASE)


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


def parse_variant(variant: str, wild_type: str, first_position: int = 1) -> list[Substitution]:
    """Parse a variant such as `H24C`, or `H24C:E26K` for several substitutions.

    Args:
        variant: wild-type residue, position and mutant residue of each substitution.
        wild_type: residues of the protein, upper case.
        first_position: position of the protein's first residue.

    Raises:
        ValueError: the notation is invalid, a position lies outside the protein or appears twice, or the protein has
            another residue there.
    """
    substitutions: list[Substitution] = []
    for part in variant.strip().split(":"):
        match = _SUBSTITUTION.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{variant!r} is not a variant: write the residue, its position and the mutant, such as H24C"
            )
        index = int(match[2]) - first_position
        if not 0 <= index < len(wild_type):
            numbers = f"{first_position} to {first_position + len(wild_type) - 1}"
            raise ValueError(f"{variant!r}: position {match[2]} lies outside the protein, {numbers}")
        residue, mutant = (normalize_sequence(letter, name=repr(variant)) for letter in (match[1], match[3]))
        if wild_type[index] != residue:
            actual = f"residue {match[2]} is {wild_type[index]}"
            raise ValueError(f"{variant!r}: {actual}; is {first_position} the position of the first residue?")
        if any(other.index == index for other in substitutions):
            raise ValueError(f"{variant!r} names position {match[2]} twice")
        substitutions.append(Substitution(residue, index, mutant))
    return substitutions


def all_substitutions(wild_type: str, first_position: int = 1) -> list[str]:
    """All substitutions by one of the 20 standard residues, such as `H24A`, position by position."""
    return [
        f"{residue}{position}{mutant}"
        for position, residue in enumerate(wild_type, start=first_position)
        for mutant in STANDARD_RESIDUES
        if mutant != residue
    ]
