"""Variants of a protein as they are written, such as `H24C`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from esm_turbo.proteins.fasta import STANDARD_RESIDUES, normalize_sequence

_SUBSTITUTION = re.compile(r"([A-Z])(-?[0-9]+)([A-Z])", re.IGNORECASE)


@dataclass(frozen=True)
class Substitution:
    """One residue in place of another.

    Attributes:
        wild_type: the residue that is there.
        index: of the residue, from 0.
        mutant: the residue that takes its place.
    """

    wild_type: str
    index: int
    mutant: str


def parse_variant(variant: str, wild_type: str, first_position: int = 1) -> list[Substitution]:
    """Takes a variant apart, such as `H24C`, or `H24C:E26K` for several substitutions.

    Args:
        variant: the residue that is there, its position, the residue that takes its place.
        wild_type: residues of the protein, upper case.
        first_position: the number of the protein's first residue.

    Raises:
        ValueError: it is written otherwise, a position lies outside of the protein or comes twice, or the residue there
            is another.
    """
    substitutions: list[Substitution] = []
    for part in variant.strip().split(":"):
        found = _SUBSTITUTION.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{variant!r} is no variant: write the residue, its position and the mutant, such as H24C")
        index = int(found[2]) - first_position
        if not 0 <= index < len(wild_type):
            numbers = f"{first_position} to {first_position + len(wild_type) - 1}"
            raise ValueError(f"{variant!r}: position {found[2]} lies outside of the protein, {numbers}")
        residue, mutant = (normalize_sequence(letter, name=repr(variant)) for letter in (found[1], found[3]))
        if wild_type[index] != residue:
            there = f"residue {found[2]} is {wild_type[index]}"
            raise ValueError(f"{variant!r}: {there}; is {first_position} the number of the first residue?")
        if any(other.index == index for other in substitutions):
            raise ValueError(f"{variant!r} names position {found[2]} twice")
        substitutions.append(Substitution(residue, index, mutant))
    return substitutions


def all_substitutions(wild_type: str, first_position: int = 1) -> list[str]:
    """Every substitution by one of the 20 standard residues, position by position, such as `H24A`."""
    return [
        f"{residue}{position}{mutant}"
        for position, residue in enumerate(wild_type, start=first_position)
        for mutant in STANDARD_RESIDUES
        if mutant != residue
    ]
