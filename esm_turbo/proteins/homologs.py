"""Contexts of several sequences, for families in which a query sees its homologs and they never see it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.tokens import TokenCodes

SEPARATOR = ","
"""Stands between the sequences of a context."""

_FAMILY_IN_HEADER = re.compile(r"(?:^|\s)family=(\S+)")


@dataclass(frozen=True)
class ContextLimits:
    """Limits of the contexts that a model can read.

    Attributes:
        sequences: in all, the query included.
        residues: of one sequence.
        positions: of all sequences together, what stands around their residues included.
    """

    sequences: int
    residues: int
    positions: int

    def check(self, name: str, sequences: int, positions: int) -> None:
        """Check the size of a context, or of one with its query.

        Args:
            name: of what is checked, for the error.
            sequences: their number.
            positions: their number.

        Raises:
            ValueError: it is too large.
        """
        if sequences > self.sequences:
            raise ValueError(f"{name}: {sequences} sequences are too many; the model reads at most {self.sequences}")
        if positions > self.positions:
            raise ValueError(
                f"{name}: {positions:,} positions are too many; the model reads at most {self.positions:,}"
            )

    def check_sequences(self, name: str, sequences: Collection[str], around: int) -> None:
        """Check the size of sequences that are read together, with so many tokens around each, as `check`."""
        self.check(name, len(sequences), sum(len(one) + around for one in sequences))

    def check_length(self, name: str, residues: int) -> None:
        """Check the length of one sequence.

        Raises:
            ValueError: it is too long.
        """
        if residues > self.residues:
            raise ValueError(f"{name}: {residues:,} residues are too many; the model reads at most {self.residues:,}")


def join_families(records: Iterable[ProteinRecord]) -> list[ProteinRecord]:
    """Families of homologs as records of several sequences, separated by commas, in the order of their first members.

    Args:
        records: with `family=NAME` in their headers, or already joined; others are no family.

    Raises:
        ValueError: there is no family of several.
    """
    families: dict[str, list[ProteinRecord]] = {}
    for record in records:
        if SEPARATOR in record.sequence:
            families[f" {len(families)}"] = [record]
        elif named := _FAMILY_IN_HEADER.search(record.description):
            families.setdefault(named[1], []).append(record)
    joined = [
        ProteinRecord(family[0].id, SEPARATOR.join(one.sequence for one in family), family[0].description)
        for family in families.values()
    ]
    joined = [record for record in joined if SEPARATOR in record.sequence]
    if not joined:
        raise ValueError(
            "there are no families of homologs, which exact contexts are measured on: the headers of their sequences"
            " must say `family=NAME`"
        )
    return joined


def encode_homologs(codes: TokenCodes, context: str | ProteinRecord, name: str, limits: ContextLimits) -> list[int]:
    """Token ids of a context, homologs that are separated by commas, one after the other.

    Raises:
        TypeError: the context is not a string.
        ValueError: a homolog is empty, too long, has a mask, white space or a letter that is no residue, or there are
            too many.
    """
    text = context.sequence if isinstance(context, ProteinRecord) else context
    if not isinstance(text, str):
        raise TypeError(f"{name}: a context must be a string, got {type(text).__name__}")
    homologs = text.split(SEPARATOR)
    ids: list[int] = []
    for number, homolog in enumerate(homologs, start=1):
        own = name if len(homologs) == 1 else f"{name}, homolog {number}"
        # Two homologs in one string would be read as one.
        if len(homolog.split()) > 1:
            raise ValueError(f"{own}: has white space inside; remove it, or separate homologs by commas")
        residues = codes.encode(homolog, own)
        if codes.mask in residues:
            raise ValueError(f"{own}: position {residues.index(codes.mask) + 1} is a mask, which only a query may have")
        limits.check_length(own, len(residues))
        ids += codes.whole(residues)
    limits.check(name, len(homologs), len(ids))
    return ids


def decode_homologs(codes: TokenCodes, ids: Sequence[int]) -> str:
    """The homologs of a context's token ids, separated by commas: the inverse of `encode_homologs`."""
    begins = [place for place, token in enumerate(ids) if token == codes.cls]
    whole = (ids[begin:end] for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True))
    return SEPARATOR.join(codes.decode(one[len(codes.before) : len(one) - len(codes.after)]) for one in whole)
