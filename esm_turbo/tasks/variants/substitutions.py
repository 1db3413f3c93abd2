"""Notation of protein variants: `H24C`, as in deep mutational scans, or `p.His24Cys`, as HGVS has it (den Dunnen 2016).

Insertions and deletions are in HGVS's notation, with names of residues of one letter or three: `K2del`, `K2_G4del`,
`K2_G3insQS`, `C28_K29delinsW`, `A3_S5dup`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from esm_turbo.proteins.fasta import CHAIN_BREAK, PARTICULAR_RESIDUES, STANDARD_RESIDUES

_POSITION_DIGITS = 18
_READABLE_DIGITS = sys.int_info.default_max_str_digits
# Of variants, by which a numbering is looked for.
_MOST_RESIDUES = 200
_CHANGE = re.compile(
    # Of inserted residues in mixed case, some are in names that are not known.
    r"([A-Z])(-?[0-9]+)(?:_([A-Z])(-?[0-9]+))?([A-Z]|del|dup|(?:del)?ins((?-i:[A-Z]+|[a-z]+)))",
    re.IGNORECASE | re.ASCII,
)
# A residue deleted and another one inserted in its place, which is a substitution.
_SWAP = re.compile(r"^([A-Z]-?[0-9]+)delins([A-Z])$", re.IGNORECASE | re.ASCII)
# The part of a name that is of the protein: of `NP_1.1:p.(Ser1Ala)`, and of `NM_1.2(ABC):c.1T>G (p.Ser1Ala)`.
_HGVS = re.compile(r"(?:^|[:(\s])p\.(.+)$", re.ASCII | re.DOTALL)
# Changes of two proteins (in trans), or perhaps of two; and a repeat.
_SEVERAL_PROTEINS = re.compile(r"\]\s*;\s*\[|\(;\)|[0-9]\[")
_NAME = re.compile(r"[A-Z][a-z]{2}", re.ASCII)
_RESIDUES = (
    "AlaA CysC AspD GluE PheF GlyG HisH IleI LysK LeuL MetM AsnN ProP GlnQ ArgR SerS ThrT ValV TrpW TyrY SecU PylO AsxB"
    " GlxZ XaaX"
)
_LETTERS = {one[:3]: one[3] for one in _RESIDUES.split()}
# Inserted residues in lower case that may be names, or the end of the protein.
_LOWER_CASE_NAMES = re.compile(f"(?:{'|'.join([*_LETTERS, 'Ter']).lower()})+")
_HOW = (
    "write the residue, its position and the mutant, such as H24C or p.His24Cys; several as H24C:E26K, insertions and"
    " deletions as K2_G4del, K2_G3insQS or K2delinsWC"
)


@dataclass(frozen=True, slots=True)
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


def has_protein_change(text: str) -> bool:
    """True if a text names a change of a protein in HGVS's notation, alone or after that of its gene."""
    return _HGVS.search(text.strip()) is not None


def split_variant(variant: str) -> list[str]:
    """The changes of a variant, residues by their letters: of `p.[Ser1Ala;Gly2=]`, `S1A` and `G2G`."""
    text = variant.strip()
    if (found := _HGVS.search(text)) is not None and not _SEVERAL_PROTEINS.search(text):
        text = re.sub(r"[][()\s]", "", found[1]).replace(";", ":")
    parts = (_NAME.sub(lambda name: _LETTERS.get(name[0], name[0]), part.strip()) for part in text.split(":"))
    parts = (part[0] + part[1:-1] + part[0] if part.endswith("=") else part for part in parts)
    return [_SWAP.sub(r"\1\2", part) for part in parts]


def is_variant(text: str) -> bool:
    """True if a text has the notation of a variant, such as `H24C` or `H24C:E26K`."""
    return all(_CHANGE.fullmatch(part) for part in split_variant(text))


def has_indel(variant: str) -> bool:
    """True if a variant has insertions or deletions; False of what is no variant."""
    matches = [_CHANGE.fullmatch(part) for part in split_variant(variant)]
    return all(matches) and any(match is not None and len(match[5]) > 1 for match in matches)


def parse_variants(variants: Sequence[str], wild_type: str, first_position: int = 1) -> list[list[Substitution]]:
    """Parse variants such as `H24C` or `p.His24Cys`, or `H24C:E26K` for several substitutions.

    Args:
        variants: all numbered alike; wild-type residue, position and mutant residue of each substitution.
        wild_type: residues of the protein, upper case.
        first_position: position of the protein's first residue; breaks between chains count as residues.

    Raises:
        MisnumberedError: (a ValueError) a position lies outside the protein, or the protein has another residue there;
            the message names the likely cause.
        ValueError: the notation is invalid, or a position appears twice.
    """
    parsed = []
    for variant in variants:
        try:
            parsed.append(_substitutions(variant, wild_type, first_position))
        except MisnumberedError as error:
            raise MisnumberedError(error.found, likely_cause(variants, wild_type, first_position)) from None
    return parsed


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
        for part in split_variant(variant)
        if (match := _CHANGE.fullmatch(part)) and len(match[2]) <= _POSITION_DIGITS
    )
    places: dict[str, list[int]] = {}
    for index, residue in enumerate(wild_type):
        places.setdefault(residue, []).append(index)
    # Every place of a residue gives a numbering: the best ones of some residues are then counted over all.
    fitting, some = Counter[int](), islice(named, 0, None, 1 + len(named) // _MOST_RESIDUES)
    for residue, position in some:
        for index in places.get(residue, ()):
            fitting[position - index] += named[residue, position]
    protein = set(enumerate(wild_type))
    for first in (first_position, *(first for first, _ in fitting.most_common(2))):
        named_there = (times for (residue, position), times in named.items() if (position - first, residue) in protein)
        fitting[first] = sum(named_there)
    (best, most), (_, next_most) = [*fitting.most_common(2), (0, 0), (0, 0)][:2]
    total = named.total()
    # Of a few variants, another numbering may fit all by chance.
    if fitting[first_position] and 2 * fitting[first_position] >= total:
        share = f"{fitting[first_position]:,} of the {total:,} residues that the variants name"
        return f"counted from {first_position}, the protein has {share}: correct this one"
    if 2 * most <= total:
        return f"no numbering fits{' most of them' if total > 1 else ''}; another protein or isoform?"
    if most == next_most:
        return f"is {first_position} the position of the first residue? `first_position` sets it"
    share = "it fits" if total == 1 else f"{f'{most:,} of' if most < total else 'all'} {total:,} residues fit"
    return f"is {first_position} the position of the first residue? With `first_position` {best}, {share}"


def unfitting(
    variants: Sequence[str], wild_type: str, first_position: int, *, indels: bool = False
) -> dict[int, ValueError]:
    """Errors of the variants of a protein that cannot be scored, by index.

    Args:
        variants: all numbered alike.
        wild_type: residues of the protein, upper case.
        first_position: position of its first residue.
        indels: whether insertions and deletions can be scored.
    """
    wrong: dict[int, ValueError] = {}
    for index, variant in enumerate(variants):
        try:
            (mutated if indels else _substitutions)(variant, wild_type, first_position)
        except ValueError as error:
            wrong[index] = error
    misnumbered = {index: one.found for index, one in wrong.items() if isinstance(one, MisnumberedError)}
    cause = likely_cause(variants, wild_type, first_position) if misnumbered else None
    return wrong | {index: MisnumberedError(found, cause) for index, found in misnumbered.items()}


def _substitutions(variant: str, wild_type: str, first_position: int) -> list[Substitution]:
    """One of `parse_variants`; errors leave out the likely cause, which is looked for once."""
    substitutions: list[Substitution] = []
    for part, match in _matched(variant):
        if len(match[5]) > 1:
            raise ValueError(
                f"{variant!r}: {part} has no marginals, which are of substitutions, such as V10G:I11G; score it, and"
                " all that it is compared with, by pseudo-perplexity (esm-turbo variants --method pseudo_perplexity, in"
                " Python method='pseudo_perplexity'): its scores, per residue, do not compare with marginals"
            )
        residue, index = _residue_at(variant, match[1], match[2], wild_type, first_position)
        mutant = _checked_mutants(variant, match[5])
        if any(other.index == index for other in substitutions):
            raise ValueError(f"{variant!r} names position {match[2]} twice")
        substitutions.append(Substitution(residue, index, mutant))
    return substitutions


def mutated(variant: str, wild_type: str, first_position: int = 1) -> str:
    """Residues of a protein with a variant: substitutions, insertions and deletions.

    Args:
        variant: in either notation, see the module.
        wild_type: residues of the protein, upper case.
        first_position: position of the protein's first residue.

    Raises:
        MisnumberedError: (a ValueError) a position lies outside the protein, or the protein has another residue there.
        ValueError: the notation is invalid, changes overlap, or nothing is left.
    """
    changes = []
    for part, match in _matched(variant):
        start = _residue_at(variant, match[1], match[2], wild_type, first_position)[1]
        end = start + 1
        if match[3] is not None:
            end = _residue_at(variant, match[3], match[4], wild_type, first_position)[1] + 1
            if end <= start + 1:
                raise ValueError(f"{variant!r}: {part} must begin before it ends")
        kind = match[5].lower()
        new = "" if kind == "del" else wild_type[start:end] if kind == "dup" else match[6] or match[5]
        if kind == "dup":
            start = end
        elif kind.startswith("ins"):
            if end != start + 2:
                raise ValueError(f"{variant!r}: {part} must name the two residues between which it is, as K2_G3insQS")
            start = end = start + 1
        changes.append((start, end, new if kind == "dup" else _checked_mutants(variant, new)))
    changes.sort(key=lambda one: one[:2])
    residues, done = "", 0
    for number, (start, end, new) in enumerate(changes):
        if start < done or (number and (start, end) == changes[number - 1][:2]):
            raise ValueError(f"{variant!r}: its changes overlap")
        residues += wild_type[done:start] + new
        done = end
    residues += wild_type[done:]
    if not residues:
        raise ValueError(f"{variant!r} leaves nothing of the protein")
    return residues


def _matched(variant: str) -> list[tuple[str, re.Match[str]]]:
    """The changes of a variant, each with its parts."""
    found = []
    for part in split_variant(variant):
        match = _CHANGE.fullmatch(part)
        if match is None:
            why = _HOW
            if re.search(r"Ter|\*|fs|ext", part):
                why = f"{part} changes where the protein ends, which has no score"
            elif _CHANGE.fullmatch(_NAME.sub("X", part)):
                why = f"{_NAME.findall(part)[0]} names no residue"
            raise ValueError(f"{variant!r} is not a variant: {why}")
        if match[3] is not None and len(match[5]) == 1:
            raise ValueError(f"{variant!r}: {part} puts one residue in place of several; write delins{match[5]}")
        if _LOWER_CASE_NAMES.fullmatch(new := match[6] or ""):
            raise ValueError(f"{variant!r}: {new} may be letters or names; write {new.upper()} or {_titled(new)}")
        found.append((part, match))
    return found


def _titled(names: str) -> str:
    """Names of residues in a row, in the case of HGVS."""
    return re.sub("...", lambda name: name[0].capitalize(), names)


def _residue_at(variant: str, letter: str, position: str, wild_type: str, first_position: int) -> tuple[str, int]:
    """The residue that a variant names, and its index."""
    index = int(position) - first_position if len(position) <= _READABLE_DIGITS else -1
    if not 0 <= index < len(wild_type):
        numbers = f"{first_position} to {first_position + len(wild_type) - 1}"
        raise MisnumberedError(f"{variant!r}: position {position} lies outside the protein, {numbers}")
    if wild_type[index] != letter.upper():
        raise MisnumberedError(f"{variant!r}: residue {position} is {wild_type[index]}")
    return letter.upper(), index


def _checked_mutants(variant: str, letters: str) -> str:
    """New residues, upper case."""
    for letter in (letters := letters.upper()):
        if letter not in PARTICULAR_RESIDUES:
            raise ValueError(f"{variant!r}: the mutant must be one of {PARTICULAR_RESIDUES}, got {letter}")
    return letters


RESIDUE_COLUMNS = ("position", "wild_type_residue", "mutant_residue")
"""Columns of `parts_of` in tables."""


def _parts(match: re.Match[str]) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Positions and residues of the wild type, and what becomes of them."""
    new = match[6] or (match[5] if len(match[5]) == 1 else "")
    change = match[5].removesuffix(new).lower() + new.upper()
    residues = match[1].upper(), *([] if match[3] is None else [match[3].upper()])
    return tuple(str(int(one)) for one in (match[2], match[4]) if one is not None), residues, change


def parts_of(variant: str) -> tuple[int | str, str, str]:
    """Position, residue of the wild type and mutant residue of a valid variant; several are joined: `24;26`, `H:E`.

    A spreadsheet would read 24:26 as a time. Of `K2_G4del`, they are `2_4`, `K_G` and `del`.
    """
    parts = [_parts(match) for _, match in _matched(variant)]
    positions, residues = (mark.join("_".join(one[index]) for one in parts) for index, mark in enumerate(";:"))
    return int(positions) if positions.lstrip("-").isdigit() else positions, residues, ":".join(one[2] for one in parts)


def all_substitutions(wild_type: str, first_position: int = 1) -> list[str]:
    """All substitutions by one of the 20 standard residues, position by position, such as `H24A`."""
    return [
        f"{residue}{position}{mutant}"
        for position, residue in enumerate(wild_type, first_position)
        if residue != CHAIN_BREAK
        for mutant in STANDARD_RESIDUES
        if mutant != residue
    ]
