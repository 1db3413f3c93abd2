"""Scoring the variants of a file on their wild type, as `esm-turbo variants` does."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from esm_turbo.files.csv_files import CsvError, CsvRow, read_csv, write_csv
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.tasks.common.memory import check_memory
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.progress import Progress, part_of
from esm_turbo.tasks.common.rankings import spearman
from esm_turbo.tasks.common.records import parse_rows
from esm_turbo.tasks.variants.score import VariantScores, score_variants
from esm_turbo.tasks.variants.substitutions import all_substitutions, parse_variant

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# If more variants than this are bad, and more than are good, a wrong position or protein is the likely cause.
_LISTED = 20


@dataclass(frozen=True)
class MeasuredVariant:
    """A variant of a file.

    Attributes:
        variant: such as `H24C`.
        measured: measured fitness, higher is better; None if the file has none.
    """

    variant: str
    measured: float | None = None


@dataclass(frozen=True)
class VariantsRun:
    """Scores of variants in one or several arms.

    Attributes:
        variants: in the order of the file.
        scores: by arm.
    """

    variants: tuple[MeasuredVariant, ...]
    scores: Mapping[Arm, VariantScores]

    def against_measured(self, arm: Arm) -> float | None:
        """Spearman's correlation with the measurements; None if there are too few."""
        pairs = [
            (one.score, variant.measured)
            for one, variant in zip(self.scores[arm].scores, self.variants, strict=True)
            if variant.measured is not None
        ]
        return spearman([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def against_full(self, arm: Arm) -> float | None:
        """Spearman's correlation with the full arm; None if that was not run."""
        return spearman(self.scores[arm].values, self.scores["full"].values) if "full" in self.scores else None

    def write(self, out: str | os.PathLike[str] | TextIO) -> None:
        """Write variants, measurements and the scores of every arm to a CSV file, atomically, or to an open file."""
        rows = (
            [variant.variant, "" if variant.measured is None else variant.measured, *scores]
            for variant, *scores in zip(self.variants, *(s.values for s in self.scores.values()), strict=True)
        )
        write_csv(out, ["mutant", "measured", *self.scores], rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "variants": len(self.variants),
            "arms": {
                arm: {
                    "spearman_with_measured": self.against_measured(arm),
                    "spearman_with_full": self.against_full(arm),
                    **scores.to_dict(),
                }
                for arm, scores in self.scores.items()
            },
        }


def read_variants(
    path: str | os.PathLike[str], wild_type: ProteinRecord, *, first_position: int = 1, measured: str | None = None
) -> tuple[list[MeasuredVariant], list[BadRecord]]:
    """Read variants from the column `mutant` of a CSV file, and their measurements from another column.

    Args:
        path: the file.
        wild_type: the protein that the variants are of.
        first_position: position of its first residue.
        measured: name of the column of measurements; None uses `fitness` if there is one.

    Returns:
        The good variants and the bad ones, in the order of the file.

    Raises:
        ValueError: the file as a whole cannot be used.
    """
    required = ["mutant"] if measured is None else ["mutant", measured]
    column = "fitness" if measured is None else measured

    def parse(number: int, row: CsvRow) -> MeasuredVariant:
        parse_variant(row["mutant"], wild_type.sequence, first_position)
        return MeasuredVariant(row["mutant"], _number(row[column], column))

    rows = read_csv(path, required, [column])
    good, bad = parse_rows(path, rows, "variants", lambda row: f"line {row.line}", parse)
    if len(bad) > max(len(good), _LISTED):
        raise CsvError(
            f"{os.fspath(path)}: {len(bad):,} of {len(rows):,} variants are not of {wild_type.id}; is"
            f" {first_position} the position of its first residue? {bad[0].record}: {bad[0].reason}"
        )
    return good, bad


def score_file(
    turbo: ContextModel,
    wild_type: ProteinRecord,
    variants: Sequence[MeasuredVariant] | None,
    arms: Sequence[Arm],
    *,
    first_position: int = 1,
    progress: Progress | None = None,
    **options: Any,
) -> VariantsRun:
    """Score variants in one or several arms.

    Args:
        wild_type: the protein.
        variants: its variants; None for all single substitutions.
        arms: one arm or several.
        first_position: position of the protein's first residue.
        progress: called with the arm as stage and positions, see `Progress`.
        **options: further arguments of `score.score_variants`.

    Raises:
        NotEnoughMemoryError: the protein needs more memory than is free.
        ValueError: a score is not finite.
    """
    # Before there is an object for each of its variants.
    check_memory(turbo.model.esm, len(wild_type.sequence) + 2)
    if variants is None:
        variants = [MeasuredVariant(name) for name in all_substitutions(wild_type.sequence, first_position)]
    names = [one.variant for one in variants]
    scores: dict[Arm, VariantScores] = {}
    for arm in arms:
        scores[arm] = score_variants(
            turbo,
            wild_type.sequence,
            names,
            arm=arm,
            first_position=first_position,
            progress=part_of(progress, stage=arm),
            **options,
        )
        if not all(map(math.isfinite, scores[arm].values)):
            raise ValueError(f"scores of {wild_type.id} are not finite; try --dtype float32")
    return VariantsRun(tuple(variants), scores)


def _number(text: str, column: str) -> float | None:
    """A measurement; None for an empty cell."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, not a number; correct it or leave it empty") from None
    if not math.isfinite(value):
        raise ValueError(f"{column} is {text!r}, not finite; correct it or leave it empty")
    return value
