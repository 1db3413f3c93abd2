"""Scoring the variants of a table on their wild types, as `esm-turbo variants` does."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from esm_turbo.files.csv_files import CsvError, CsvRow, read_csv
from esm_turbo.files.journal import Journal
from esm_turbo.files.tabular import counted, named
from esm_turbo.files.text_files import NO_SUCH_FILE
from esm_turbo.proteins.alignments import HomologContext
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord, check_identifiers
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.proteins.lookup import ProteinIndex
from esm_turbo.tasks.common.forwards import ARMS
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.pieces import Plan, Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.rankings import spearman
from esm_turbo.tasks.common.record_results import RecordResult, RecordRun
from esm_turbo.tasks.common.records import parse_rows
from esm_turbo.tasks.common.scoring_task import score_items
from esm_turbo.tasks.variants.many import VariantsTask, WildType
from esm_turbo.tasks.variants.score import VariantScores, first_position_of
from esm_turbo.tasks.variants.substitutions import (
    RESIDUE_COLUMNS,
    MisnumberedError,
    has_protein_change,
    is_variant,
    parts_of,
    unfitting,
)

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

PROTEIN_COLUMN = "protein"
"""Column of a table of variants that names their wild types."""

# Columns of measurements that are used if none is named, the first that exists.
_MEASURED_COLUMNS = ("fitness", "DMS_score")
# In HGVS's notation, of a gene or a transcript.
_OF_A_GENE = re.compile(r"(^|:)[cgmnr]\.")
# What a change is of: the gene of `NM_1.2(ABC):c.1T>G (p.Ser1Ala)`, or the protein of `NP_1.1:p.(Ser1Ala)`.
_SUBJECT = re.compile(r"\((?P<gene>[^()\s]+)\):|^(?P<protein>[^\s:()]+?)(?:\.\d+)?:(?=p\.)", re.ASCII)
# If more variants than this are bad, and more than are good, a wrong position or protein is the likely cause.
_LISTED = 20


@dataclass(frozen=True)
class MeasuredVariant:
    """A variant of a table.

    Attributes:
        variant: such as `H24C`.
        measured: measured fitness, higher is better; None if the table has none.
        protein: identifier of its wild type; None if there is only one.
        columns: the other columns of its row; None if it comes from no table.
    """

    variant: str
    measured: float | None = None
    protein: str | None = None
    columns: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.measured is not None and math.isnan(self.measured):
            # As pandas writes what there is not.
            object.__setattr__(self, "measured", None)


@dataclass(frozen=True)
class ProteinVariants(RecordResult):
    """Scores of the variants of one protein in one or several arms.

    Attributes:
        wild_type: the record.
        first_position: position of its first residue.
        variants: in the order of the table.
        scores: by arm.
        numbers: see `RecordResult`.
    """

    wild_type: ProteinRecord
    first_position: int
    variants: tuple[MeasuredVariant, ...]
    scores: Mapping[Arm, VariantScores]
    numbers: Sequence[int] | None = None

    scored = "variants"

    def __repr__(self) -> str:
        return named(self, self.wild_type.id, counted(len(self.variants), "variant"), arms=list(self.scores))

    @property
    def record(self) -> ProteinRecord:
        """The wild type."""
        return self.wild_type

    @property
    def reference(self) -> Arm:
        """The arm that orders the variants: the first."""
        return next(iter(self.scores))

    def ranking(self) -> list[int]:
        """Indices of the variants, best first."""
        return self.scores[self.reference].ranking()

    def against_measured(self, arm: Arm) -> float | None:
        """Spearman's correlation with the measurements; None if there are too few."""
        pairs = [
            (one.score, variant.measured)
            for one, variant in zip(self.scores[arm].scores, self.variants, strict=True)
            if variant.measured is not None
        ]
        return spearman([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def against_full(self, arm: Arm) -> float | None:
        """Spearman's correlation with the full arm; None if that was not run, or is this one."""
        if arm == "full" or "full" not in self.scores:
            return None
        return spearman(self.scores[arm].values, self.scores["full"].values)

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["protein", "mutant", *RESIDUE_COLUMNS, *self.scores, "run_method"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per variant its protein, name, position, residues, score in every arm, and the method of the scores."""
        method = self.scores[self.reference].method
        for variant, *scores in zip(self.variants, *(s.values for s in self.scores.values()), strict=True):
            yield self.wild_type.id, variant.variant, *parts_of(variant.variant), *scores, method

    def given(self) -> Iterator[Mapping[str, str]]:
        """Columns of the table of each variant."""
        return (variant.columns or {} for variant in self.variants)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "protein": self.wild_type.id,
            "residues": len(self.wild_type.sequence),
            "first_position": self.first_position,
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

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> Self:
        """See `RecordResult.from_state`."""
        record, first = ProteinRecord(**values["wild_type"]), values["first_position"]
        variants = tuple(MeasuredVariant(**one) for one in values["variants"])
        scores = {arm: VariantScores.from_dict(one, record.sequence, first) for arm, one in values["scores"].items()}
        return cls(record, first, variants, scores, values["numbers"])


@dataclass(repr=False)
class VariantsRun(RecordRun[ProteinVariants]):
    """Scores on all wild types, see `RecordRun`."""

    noun, result_class = "protein", ProteinVariants
    no_columns = ("protein", "mutant", *RESIDUE_COLUMNS)
    more_columns = ("run_method",)
    # Positions are text, as several substitutions have several: `24;26`.
    types = dict.fromkeys(ARMS, float)


def read_variants(
    path: str | os.PathLike[str],
    wild_types: Sequence[ProteinRecord],
    *,
    first_position: int | None = None,
    protein_column: str | None = None,
    measured: str | None = None,
    mutant_column: str = "mutant",
    indels: bool = False,
) -> tuple[list[MeasuredVariant], list[BadRecord]]:
    """Read variants from a column of a table, their wild types and measurements from other columns.

    Args:
        path: the file.
        wild_types: the proteins that the variants are of.
        first_position: position of the first residue of each; None reads it from their headers, or is 1.
        protein_column: name of the column that holds identifiers or sequences of wild types; None uses `protein`,
            which a table for a single wild type may lack.
        measured: name of the column of measurements; None uses `fitness` or `DMS_score` if there is one.
        mutant_column: name of the column that holds the variants, alone or after those of their genes, as in ClinVar's
            `NM_000546.6(TP53):c.524G>A (p.Arg175His)`.
        indels: whether insertions and deletions are good.

    Returns:
        The good variants and the bad ones, in the order of the file.

    Raises:
        ValueError: the file as a whole cannot be used.
    """
    by_name = protein_column or PROTEIN_COLUMN
    required = [mutant_column, *(name for name in (protein_column, measured) if name is not None)]
    if is_variant(os.fspath(path)) and not os.path.exists(path):
        raise CsvError(f"{os.fspath(path)}: {NO_SUCH_FILE}; variants belong in the column 'mutant' of a CSV file")
    if measured is not None and measured.lower() in VariantsRun.own_names():
        raise CsvError(f"{os.fspath(path)}: {measured!r} is a column of scores, too; rename that of the measurements")
    rows = read_csv(path, required, [by_name, *_MEASURED_COLUMNS])
    if len(wild_types) > 1 and rows and by_name.lower() not in map(str.lower, rows[0].cells):
        raise CsvError(
            f"{os.fspath(path)}: lacks the column {by_name!r}, which names the wild type of each variant; there are"
            f" {len(wild_types)}, such as {wild_types[0].id!r}"
        )
    column = measured or next((name for name in _MEASURED_COLUMNS if any(row[name] for row in rows)), None)
    proteins = ProteinIndex(wild_types)
    # What is read under another name is kept beside them.
    written_again = {"protein", "mutant"} & {by_name.lower(), mutant_column.lower()}

    subjects = Counter((row[by_name], *one) for row in rows if (one := _subject(row[mutant_column])) is not None)
    usual = {(name, kind): subject for (name, kind, subject), _ in reversed(subjects.most_common())}

    def parse(number: int, row: CsvRow) -> tuple[str, MeasuredVariant]:
        if not row[by_name] and len(wild_types) > 1:
            raise ValueError(f"names no protein; fill the column {by_name!r}")
        wild_type = proteins.find(row[by_name]) if row[by_name] else wild_types[0]
        name = row[mutant_column]
        if _OF_A_GENE.search(name) and not has_protein_change(name):
            raise ValueError(f"{name!r} names no change of the protein, such as (p.Arg175His)")
        if (one := _subject(name)) is not None and (most := usual[row[by_name], one[0]]) != one[1]:
            raise ValueError(
                f"{name!r} is of {one[1]}, and most variants are of {most}; give others in a table of their own"
            )
        value = None if column is None else _number(row[column], column)
        return f"line {row.line}", MeasuredVariant(name, value, wild_type.id, row.without(*written_again))

    read, bad = parse_rows(path, rows, "variants", lambda row: f"line {row.line}", parse)
    by_protein: dict[str | None, list[tuple[str, str]]] = {}
    for line, variant in read:
        by_protein.setdefault(variant.protein, []).append((line, variant.variant))
    left_out, summed_up = set[str](), list[BadRecord]()
    for wild_type in wild_types:
        own = by_protein.get(wild_type.id, [])
        position = first_position_of(wild_type, first_position)
        found = unfitting([name for _, name in own], wild_type.sequence, position, indels=indels)
        left_out |= {own[index][0] for index in found}
        if len(found) <= max(len(own) - len(found), _LISTED):
            bad += [BadRecord(own[index][0], str(error)) for index, error in found.items()]
            continue
        left_out |= {line for line, _ in own}
        example = next((i for i, error in found.items() if isinstance(error, MisnumberedError)), min(found))
        reason = (
            f"{len(found):,} of {len(own):,} variants are not of {wild_type.id}, such as {own[example][0]}:"
            f" {found[example]}"
        )
        if len(wild_types) == 1:
            raise CsvError(f"{os.fspath(path)}: {reason}")
        summed_up.append(BadRecord(wild_type.id, reason, len(found)))
    lines = {f"line {row.line}": number for number, row in enumerate(rows)}
    bad.sort(key=lambda one: lines.get(one.record, len(lines)))
    return [variant for line, variant in read if line not in left_out], [*bad, *summed_up]


def score_records(
    turbo: ContextModel,
    wild_types: Sequence[ProteinRecord],
    variants: Sequence[MeasuredVariant] | None,
    arms: Sequence[Arm],
    *,
    first_position: int | None = None,
    contexts: str | HomologContext | Sequence[str | HomologContext] = (),
    progress: Progress | None = None,
    runner: Runner | None = None,
    plan: Plan | None = None,
    journal: Journal | None = None,
    **options: Any,
) -> VariantsRun:
    """Score variants of proteins. Proteins that do not fit into memory, or have no finite scores, are reported.

    Args:
        wild_types: the proteins.
        variants: their variants, those without `protein` of all of them; None for all single substitutions.
        arms: one arm or several.
        first_position: position of each protein's first residue; None reads it from its header, or is 1.
        contexts: homologs that every protein is read after, one context or several, see `score_variants`.
        progress: called with stage `score` and positions of all proteins in all arms, see `Progress`.
        runner: as of `score_items`, as are `plan` and `journal`.
        **options: of a `VariantsTask`.

    Raises:
        ValueError: an identifier names two proteins, or as of `score_items`.
    """
    wild_types = list(wild_types)
    check_identifiers(wild_types)
    several = (contexts,) if isinstance(contexts, str | HomologContext) else contexts
    homologs = [one.sequence if isinstance(one, HomologContext) else one for one in several]
    own_variants: dict[str, list[MeasuredVariant]] = {record.id: [] for record in wild_types}
    for variant in variants or ():
        for identifier in own_variants if variant.protein is None else [variant.protein]:
            own_variants[identifier].append(variant)
    wanted = [record for record in wild_types if variants is None or own_variants[record.id]]
    proteins = [
        WildType(
            record.sequence,
            first_position_of(record, first_position),
            None if variants is None else tuple(one.variant for one in own_variants[record.id]),
            tuple(homologs) or None,
        )
        for record in wanted
    ]
    warn_if_long((len(record.sequence) for record in wanted), turbo.model.family)
    scored = score_items(
        turbo,
        VariantsTask(tuple(arms), **options),
        proteins,
        names=[record.id for record in wanted],
        progress=progress,
        runner=runner,
        plan=plan,
        journal=journal,
    )
    run = VariantsRun()
    for number, one in scored.items():
        record, failed = wanted[number], one.failed
        if not all(math.isfinite(x) for scores in one.scores.values() for x in scores.values):
            failed = "its scores are not finite; try --dtype float32"
        if failed is not None:
            run.lose(record, failed)
            continue
        own = own_variants[record.id]
        if variants is None:
            own = [MeasuredVariant(each.variant) for each in next(iter(one.scores.values())).scores]
        elif one.numbers is not None:
            own = [own[index] for index in one.numbers]
        first = proteins[number].first_position
        run.results.append(ProteinVariants(record, first, tuple(own), one.scores, one.numbers))
    return run


def _subject(name: str) -> tuple[str, str] | None:
    """Whether a change is said to be of a gene or of a protein, and of which; None if the name does not say it."""
    found = _SUBJECT.search(name.strip())
    return None if found is None else (str(found.lastgroup), found[str(found.lastgroup)].upper())


def _number(text: str, column: str) -> float | None:
    """A measurement; None for an empty cell."""
    if not text:
        return None
    try:
        # Python reads 1_000 as 1000.
        value = float("" if "_" in text else text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, not a number; correct it or leave it empty") from None
    if not math.isfinite(value):
        raise ValueError(f"{column} is {text!r}, not finite; correct it or leave it empty")
    return value
