"""Homologs of a protein from files, and samples of them as contexts.

A context holds as many homologs as its budget allows, drawn so that close relatives count as one (Jain et al. 2025, as
in E1's own sampler): a homolog's weight is one over the number of its neighbours.
"""

from __future__ import annotations

import functools
import os
import string
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.config import DEFAULT_CONTEXT_TOKENS, DEFAULT_MAX_SIMILARITY
from esm_turbo.files.tabular import counted, named
from esm_turbo.proteins.fasta import (
    BadRecord,
    FastaError,
    ProteinRecord,
    is_alignment,
    normalize_sequence,
    raw_records,
)
from esm_turbo.proteins.homologs import SEPARATOR
from esm_turbo.proteins.limits import UntrainedInputWarning

_GAP = ord("-")
# From this share of equal residues on, homologs are neighbours.
_NEIGHBOUR = 0.8
_RELATED = 0.1
# Homologs that are compared with all others at once.
_BLOCK = 1024
# In a3m, letters that stand between the columns, and the gaps there.
_INSERTIONS = str.maketrans("", "", string.ascii_lowercase + "." + string.whitespace)
# BLOSUM62 lacks both; cysteine and lysine are nearest.
_FOR_BLOSUM = str.maketrans("UO", "CK")


class UnrelatedHomologsWarning(UntrainedInputWarning):
    """Sequences that are given as homologs of a protein do not look like them."""


@dataclass(frozen=True)
class HomologContext:
    """Homologs that were drawn as a context.

    Attributes:
        sequence: the homologs, separated by commas.
        ids: their identifiers.
        seed: of the draw, as are the others: `tokens`, `max_similarity`, `min_similarity`, `max_homologs`.
    """

    sequence: str
    ids: tuple[str, ...]
    seed: int
    tokens: int
    max_similarity: float
    min_similarity: float
    max_homologs: int

    def __repr__(self) -> str:
        residues = sum(map(len, self.sequence.split(SEPARATOR)))
        fields = {"seed": self.seed, "max_similarity": self.max_similarity}
        return named(self, counted(len(self.ids), "homolog"), counted(residues, "residue"), **fields)

    def to_dict(self) -> dict[str, Any]:
        """How it was drawn, and what, as plain JSON values without the residues."""
        values = asdict(self) | {"ids": list(self.ids)}
        del values["sequence"]
        return values


@dataclass(frozen=True, eq=False)
class HomologFamily:
    """Homologs of a protein, aligned with it. Its arrays are read-only: samples are drawn by them.

    Attributes:
        source: where they come from, for errors.
        ids: of all sequences; the protein itself may be among them.
        sequences: their residues, what lies between the protein's columns included.
        rows: residues in the columns of the protein, ASCII codes with `-` for none, uint8 [sequences, columns].
        protein: those of the protein, uint8 [columns].
    """

    source: str
    ids: tuple[str, ...]
    sequences: tuple[str, ...]
    rows: npt.NDArray[np.uint8]
    protein: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        self.rows.setflags(write=False)
        self.protein.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, too, are read-only, and compute for themselves what is derived."""
        return HomologFamily, (self.source, self.ids, self.sequences, self.rows, self.protein)

    def __len__(self) -> int:
        """Number of homologs: sequences that are not the protein itself."""
        protein = self.protein.tobytes().decode()
        return sum(sequence != protein for sequence in self.sequences)

    def __repr__(self) -> str:
        return named(self, self.source, counted(len(self), "homolog"), counted(len(self.protein), "column"))

    @functools.cached_property
    def similarity(self) -> npt.NDArray[np.float64]:
        """Share of the protein's columns in which a sequence has its residue, [sequences]."""
        equal: npt.NDArray[np.float64] = (self.rows == self.protein).mean(axis=1)
        equal.setflags(write=False)
        return equal

    @functools.cached_property
    def neighbours(self) -> npt.NDArray[np.int64]:
        """Number of homologs of each that have its residues in 80 % of their own columns, itself among them.

        Takes time with the square of their number.
        """
        residues = (self.rows != _GAP).sum(axis=1).clip(min=1)
        # The least number of equal residues; no share that is not a fifth comes near one.
        least = np.floor(_NEIGHBOUR * residues)
        least += least / residues < _NEIGHBOUR
        letters = [letter for letter in np.unique(self.rows) if letter != _GAP]
        count = len(self.ids)
        counts = np.zeros(count, dtype=np.int64)
        # Products of matrices compare faster than comparisons; float32 counts columns exactly.
        for block in range(0, count, _BLOCK):
            part = slice(block, block + _BLOCK)
            equal = np.zeros((len(self.rows[part]), count), dtype=np.float32)
            for letter in letters:
                has = (self.rows == letter).astype(np.float32)
                equal += has[part] @ has.T
            counts[part] = (equal >= least).sum(axis=1)
        counts.clip(min=1, out=counts)
        counts.setflags(write=False)
        return counts

    def sample(
        self,
        tokens: int = DEFAULT_CONTEXT_TOKENS,
        *,
        max_similarity: float = DEFAULT_MAX_SIMILARITY,
        min_similarity: float = 0.0,
        max_homologs: int = 511,
        seed: int = 0,
    ) -> HomologContext:
        """Draw homologs without replacement until the next one does not fit.

        Where `max_similarity` is 1, E1's own sampler draws the same from an a3m file with the same seed; below, it
        numbers the homologs under the cap but takes those numbers of the whole file. Homologs that alone exceed the
        budget are not drawn.

        Args:
            tokens: budget, in residues of all homologs; the four tokens around each come on top.
            max_similarity: largest share of the protein's residues that a homolog may have, 0 to 1. At 1 the protein
                itself may be drawn, if the file has it; its residue is then there to be read at a mask.
            min_similarity: smallest one.
            max_homologs: their largest number.
            seed: of the draw, at least 0.

        Raises:
            ValueError: no homolog is similar enough and not too much so, none fits into the budget, or an option is
                invalid.
        """
        for name, number, least in (("tokens", tokens, 1), ("max_homologs", max_homologs, 1), ("seed", seed, 0)):
            if type(number) is not int or number < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {number!r}")
        if not 0 <= max_similarity <= 1:
            raise ValueError(f"`max_similarity` must be a share from 0 to 1, got {max_similarity}")
        if not 0 <= min_similarity <= max_similarity:
            raise ValueError(
                f"`min_similarity` must lie in 0 to `max_similarity`, {max_similarity}, got {min_similarity}"
            )
        allowed = (self.similarity >= min_similarity) & (self.similarity <= max_similarity)
        if not allowed.any():
            least, most = self.similarity.min(), self.similarity.max()
            if least > max_similarity:
                reason = f"at most {max_similarity:.0%} of the protein's residues; raise `max_similarity`"
            else:
                reason = (
                    f"{min_similarity:.0%} to {max_similarity:.0%} of the protein's residues; lower `min_similarity`"
                )
            raise ValueError(f"{self.source}: no homolog has {reason} (they have {least:.0%} to {most:.0%})")
        lengths = np.array([len(one) for one in self.sequences])
        pool = np.flatnonzero(allowed & (lengths <= tokens))
        if not len(pool):
            shortest = int(np.flatnonzero(allowed)[lengths[allowed].argmin()])
            raise ValueError(
                f"{self.source}: no homolog fits into {tokens:,} tokens; the shortest, {self.ids[shortest]!r}, has"
                f" {lengths[shortest]:,} residues"
            )
        weights = 1.0 / self.neighbours[pool]
        drawn = np.random.default_rng(seed).choice(
            len(pool), size=min(max_homologs, len(pool)), p=weights / weights.sum(), replace=False, shuffle=True
        )
        fits = np.cumsum(lengths[pool[drawn]]) <= tokens
        chosen = pool[drawn][fits].tolist()
        return HomologContext(
            SEPARATOR.join(self.sequences[one] for one in chosen),
            tuple(self.ids[one] for one in chosen),
            seed,
            tokens,
            max_similarity,
            min_similarity,
            max_homologs,
        )

    def sample_several(
        self,
        tokens: Iterable[int] = (DEFAULT_CONTEXT_TOKENS,),
        *,
        max_similarity: Iterable[float] = (DEFAULT_MAX_SIMILARITY,),
        seed: int = 0,
        **options: Any,
    ) -> list[HomologContext]:
        """Draw a context for every budget with every cap of similarity, with seeds one after the other.

        Args:
            tokens: budgets.
            max_similarity: caps.
            seed: of the first context.
            **options: others of `sample`.

        Raises:
            ValueError: as of `sample`.
        """
        specified = enumerate(product(tokens, max_similarity))
        return [self.sample(size, max_similarity=cap, seed=seed + n, **options) for n, (size, cap) in specified]


def read_homologs(
    path: str | os.PathLike[str], protein: str | ProteinRecord, *, unknown: str | None = None
) -> HomologFamily:
    """Read the homologs of a protein, plain or gzip.

    Of an alignment, a file named `.a3m` or `.a2m`, the first record is the protein; lower case and dots stand between
    its columns. Homologs are read with their insertions and without gaps. The sequences of any other FASTA file are
    each aligned with the protein, gaps removed.

    Args:
        path: the file; identifiers may repeat.
        protein: residues, or a record.
        unknown: as for `read_fasta`.

    Raises:
        FastaError: (a ValueError) the file cannot be used, a record holds no residues or other letters, rows differ in
            their columns, the alignment is another protein's, or there are no homologs.
    """
    if not isinstance(protein, ProteinRecord):
        protein = ProteinRecord("the protein", normalize_sequence(protein, name="the protein"))
    name, residues = protein.id, protein.sequence
    raw = [((title.split(maxsplit=1) or [f"#{n}"])[0], text) for n, (title, text) in enumerate(raw_records(path), 1)]
    bad: list[BadRecord] = []
    sequences = []
    for identifier, text in raw:
        try:
            sequences.append(normalize_sequence(text, name="", unknown=unknown, remove_gaps=True))
        except ValueError as error:
            bad.append(BadRecord(identifier, str(error)))
    if bad:
        raise FastaError(os.fspath(path), bad)
    ids = [identifier for identifier, _ in raw]
    if is_alignment(path):
        if sequences[0] != residues:
            reason = f"the alignment is of this protein, not of {name}: {_difference(sequences[0], residues)}"
            raise FastaError(os.fspath(path), [BadRecord(ids[0], reason)])
        rows = _columns(path, raw)
        rows = rows[:, rows[0] != _GAP]
        protein_row = rows[0]
        if not len(protein_row):
            raise FastaError(os.fspath(path), [BadRecord(ids[0], "is all lower case, which stands between columns")])
    else:
        protein_row = np.frombuffer(residues.encode(), dtype=np.uint8)
        rows, related = _aligned(residues, sequences)
        if not related:
            warnings.warn(
                f"{os.fspath(path)}: no sequence aligns with {name} much better than backwards; is it the family of"
                " another protein?",
                UnrelatedHomologsWarning,
                stacklevel=2,
            )
    if all(sequence == residues for sequence in sequences):
        raise FastaError(os.fspath(path), [BadRecord("", f"holds {name} alone; a family needs at least one homolog")])
    return HomologFamily(Path(path).name, tuple(ids), tuple(sequences), rows, protein_row)


def _columns(path: str | os.PathLike[str], raw: Sequence[tuple[str, str]]) -> npt.NDArray[np.uint8]:
    """Columns of the rows of an alignment, uint8 [rows, columns]."""
    rows = [text.removesuffix("*").translate(_INSERTIONS).replace("~", "-") for _, text in raw]
    bad = [
        BadRecord(
            identifier,
            f"has {len(row):,} columns, and the first record {len(rows[0]):,}; leave it out if it is from the alignment"
            " of another protein, or else align it again",
        )
        for (identifier, _), row in zip(raw, rows, strict=True)
        if len(row) != len(rows[0])
    ]
    if bad:
        raise FastaError(os.fspath(path), bad)
    return np.frombuffer("".join(rows).encode("ascii", "replace"), dtype=np.uint8).reshape(len(rows), -1)


def _difference(found: str, expected: str) -> str:
    """Where two proteins differ first."""
    for position, (one, other) in enumerate(zip(found, expected, strict=False), start=1):
        if one != other:
            return f"residue {position} is {one}, not {other}"
    return f"it has {len(found):,} residues, not {len(expected):,}"


def _aligned(protein: str, sequences: Sequence[str]) -> tuple[npt.NDArray[np.uint8], bool]:
    """Residues of sequences in the columns of a protein, each aligned with it, uint8 [sequences, residues].

    And whether one of them scores much better than backwards, by a tenth of the protein with itself.
    """
    # Imported here: it takes longer to load than the rest of this module.
    from Bio import Align

    # Biopython has no types.
    library: Any = Align
    aligner = library.PairwiseAligner(mode="global", open_gap_score=-12, extend_gap_score=-1, end_gap_score=0)
    aligner.substitution_matrix = library.substitution_matrices.load("BLOSUM62")
    rows = np.full((len(sequences), len(protein)), _GAP, dtype=np.uint8)
    target, related = protein.translate(_FOR_BLOSUM), False
    margin = _RELATED * aligner.score(target, target)
    for row, sequence in zip(rows, sequences, strict=True):
        residues, query = np.frombuffer(sequence.encode(), dtype=np.uint8), sequence.translate(_FOR_BLOSUM)
        alignment = aligner.align(target, query)[0]
        related = related or alignment.score - aligner.score(target, query[::-1]) >= margin
        for (begin, end), (own, own_end) in zip(*alignment.aligned, strict=True):
            row[begin:end] = residues[own:own_end]
    return rows, related
