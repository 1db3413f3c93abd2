"""Scoring the variants of a table on their wild types, as `esm-turbo variants` does."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.files.csv_files import CsvError, CsvRow, read_csv
from esm_turbo.files.journal import Journal
from esm_turbo.files.tables import write_table
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.files.text_files import NO_SUCH_FILE
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.proteins.lookup import ProteinIndex
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.forwards import ARMS
from esm_turbo.tasks.common.options import Arm, VariantColumns, VariantMethod
from esm_turbo.tasks.common.pieces import Plan, Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.rankings import spearman
from esm_turbo.tasks.common.records import kept_columns, parse_rows
from esm_turbo.tasks.common.run_info import RUN_COLUMNS, RunInfo, run_metadata
from esm_turbo.tasks.common.scoring_task import limit_of, score_items
from esm_turbo.tasks.variants.formats import SCORE, formatted
from esm_turbo.tasks.variants.many import VariantsTask, WildType
from esm_turbo.tasks.variants.score import VariantScores, first_position_of
from esm_turbo.tasks.variants.substitutions import (
    RESIDUE_COLUMNS,
    MisnumberedError,
    has_protein_change,
    is_variant,
    likely_cause,
    mutated,
    parse_without_cause,
    parts_of,
)

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

PROTEIN_COLUMN = "protein"
"""Column of a table of variants that names their wild types."""

# Columns of measurements that are used if none is named, the first that exists.
_MEASURED_COLUMNS = ("fitness", "DMS_score")
# In HGVS's notation, of a gene or a transcript.
_OF_A_GENE = re.compile(r"(^|:)[cgmnr]\.")
# If more variants than this are bad, and more than are good, a wrong position or protein is the likely cause.
_LISTED = 20


@dataclass(frozen=True)
class MeasuredVariant:
    """A variant of a table.

    Attributes:
        variant: such as `H24C`.
        measured: measured fitness, higher is better; None if the table has none.
        protein: identifier of its wild type; None if there is only one.
        columns: all columns of its row; None if it comes from no table.
    """

    variant: str
    measured: float | None = None
    protein: str | None = None
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ProteinVariants(Tabular):
    """Scores of the variants of one protein in one or several arms.

    Attributes:
        wild_type: the record.
        first_position: position of its first residue.
        variants: in the order of the table.
        scores: by arm.
    """

    wild_type: ProteinRecord
    first_position: int
    variants: tuple[MeasuredVariant, ...]
    scores: Mapping[Arm, VariantScores]

    def __repr__(self) -> str:
        return named(self, self.wild_type.id, counted(len(self.variants), "variant"), arms=list(self.scores))

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
        return ["protein", "mutant", *RESIDUE_COLUMNS, *self.scores]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per variant its protein, name, position, residues, and score in every arm."""
        for variant, *scores in zip(self.variants, *(s.values for s in self.scores.values()), strict=True):
            yield self.wild_type.id, variant.variant, *parts_of(variant.variant), *scores

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


@dataclass
class VariantsRun(Tabular):
    """Scores on all wild types.

    Attributes:
        results: one per wild type that could be scored.
        failed: wild types that could not.
    """

    results: list[ProteinVariants] = field(default_factory=list)
    failed: list[BadRecord] = field(default_factory=list)

    def __repr__(self) -> str:
        return named(self, counted(len(self.results), "protein"), f"{len(self.failed):,} failed")

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        own = self.results[0].columns() if self.results else ["protein", "mutant", *RESIDUE_COLUMNS]
        given = (v.columns or {} for r in self.results for v in r.variants)
        return [*own, *kept_columns(given, [*own, *RUN_COLUMNS])]

    def rows(self) -> Iterator[list[object]]:
        """Per variant its protein, name, position, residues, score in every arm, and the other columns of the table."""
        columns = self.columns()
        for result in self.results:
            for variant, own in zip(result.variants, result.rows(), strict=True):
                yield [*own, *((variant.columns or {}).get(name, "") for name in columns[len(own) :])]

    def places(self, wild_types: Sequence[ProteinRecord]) -> list[tuple[int, int]]:
        """The order of the rows among those of all shards: numbers of wild types with their rows.

        Args:
            wild_types: all wild types of the input.
        """
        numbers = {record.id: number for number, record in enumerate(wild_types)}
        return [(numbers[one.wild_type.id], len(one.variants)) for one in self.results]

    def write(
        self,
        out: str | os.PathLike[str] | TextIO,
        run: RunInfo | None = None,
        settings: Mapping[str, Any] | None = None,
        columns: VariantColumns | None = None,
    ) -> None:
        """Write `rows` to a CSV, TSV or Parquet file, atomically, or as CSV to an open file.

        Args:
            out: the file.
            columns: those of another program instead, see `formats`.
            run: what the run used, added in `RUN_COLUMNS`.
            settings: the run's options, JSON values, for the metadata of a Parquet file.
        """
        if columns is not None:
            others, theirs = formatted(self.results, columns)
            numbers = [name for name in others if name.startswith(SCORE)]
            write_table(out, others, theirs, dict.fromkeys(numbers, float), run_metadata(run, settings))
            return
        names, cells = ((), []) if run is None else (RUN_COLUMNS, run.cells())
        rows = ([*row, *cells] for row in self.rows())
        # Positions are text, as several substitutions have several: `24:26`.
        write_table(out, [*self.columns(), *names], rows, dict.fromkeys(ARMS, float), run_metadata(run, settings))


@dataclass(frozen=True)
class _Wrong:
    """A variant that cannot be used.

    Attributes:
        line: name of its record.
        variant: as it was written.
        reason: why, without the likely cause.
        misnumbered: whether residue or position are not the protein's.
    """

    line: str
    variant: str
    reason: str
    misnumbered: bool


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
    rows = read_csv(path, required, [by_name, *_MEASURED_COLUMNS])
    if len(wild_types) > 1 and rows and by_name.lower() not in map(str.lower, rows[0].cells):
        raise CsvError(
            f"{os.fspath(path)}: lacks the column {by_name!r}, which names the wild type of each variant; there are"
            f" {len(wild_types)}, such as {wild_types[0].id!r}"
        )
    column = measured or next((name for name in _MEASURED_COLUMNS if any(row[name] for row in rows)), None)
    proteins = ProteinIndex(wild_types)
    wrong: dict[str, list[_Wrong]] = {}

    def parse(number: int, row: CsvRow) -> MeasuredVariant:
        if not row[by_name] and len(wild_types) > 1:
            raise ValueError(f"names no protein; fill the column {by_name!r}")
        wild_type = proteins.find(row[by_name]) if row[by_name] else wild_types[0]
        name = row[mutant_column]
        if _OF_A_GENE.search(name) and not has_protein_change(name):
            raise ValueError(f"{name!r} names no change of the protein, such as (p.Arg175His)")
        try:
            (mutated if indels else parse_without_cause)(
                name, wild_type.sequence, first_position_of(wild_type, first_position)
            )
        except ValueError as error:
            one = _Wrong(f"line {row.line}", name, str(error), isinstance(error, MisnumberedError))
            wrong.setdefault(wild_type.id, []).append(one)
            raise
        value = None if column is None else _number(row[column], column)
        return MeasuredVariant(name, value, wild_type.id, row.cells)

    good, bad = parse_rows(path, rows, "variants", lambda row: f"line {row.line}", parse)
    fitting: dict[str | None, list[str]] = {}
    for variant in good:
        fitting.setdefault(variant.protein, []).append(variant.variant)
    reasons: dict[str, str] = {}
    summed_up: dict[str, str] = {}
    for wild_type in wild_types:
        own, others = wrong.get(wild_type.id, []), fitting.get(wild_type.id, [])
        misnumbered = [one for one in own if one.misnumbered]
        if misnumbered:
            position = first_position_of(wild_type, first_position)
            # All of a protein are numbered alike, and together say more of the cause than each alone.
            cause = likely_cause([*others, *(one.variant for one in own)], wild_type.sequence, position)
            reasons |= {one.line: f"{one.reason}; {cause}" for one in misnumbered}
        if len(own) > max(len(others), _LISTED):
            example = [*misnumbered, *own][0]
            reason = (
                f"{len(own):,} of {len(others) + len(own):,} variants are not of {wild_type.id}, such as"
                f" {example.line}: {reasons.get(example.line, example.reason)}"
            )
            if len(wild_types) == 1:
                raise CsvError(f"{os.fspath(path)}: {reason}")
            summed_up[wild_type.id] = reason
    left_out = {one.line for name in summed_up for one in wrong[name]}
    good = [one for one in good if one.protein not in summed_up]
    bad = [BadRecord(one.record, reasons.get(one.record, one.reason)) for one in bad if one.record not in left_out]
    bad += [BadRecord(name, reason, len(wrong[name])) for name, reason in summed_up.items()]
    return good, bad


def score_records(
    turbo: ContextModel,
    wild_types: Sequence[ProteinRecord],
    variants: Sequence[MeasuredVariant] | None,
    arms: Sequence[Arm],
    *,
    method: VariantMethod = "masked",
    refresh: int = DEFAULT_REFRESH,
    first_position: int | None = None,
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    progress: Progress | None = None,
    runner: Runner | None = None,
    plan: Plan | None = None,
    journal: Journal | None = None,
    contexts: Sequence[str] = (),
) -> VariantsRun:
    """Score variants of proteins. Proteins that do not fit into memory, or have no finite scores, are reported.

    A piece is some proteins with their variants, or by pseudo-perplexity one protein with some of many, up to
    `piece_limit` tokens to run, in batches filled across proteins.

    Args:
        wild_types: the proteins.
        variants: their variants, those without `protein` of all of them; None for all single substitutions.
        arms: one arm or several.
        first_position: position of each protein's first residue; None reads it from its header, or is 1.
        progress: called with stage `score` and positions of all proteins in all arms, see `Progress`.
        runner: where pieces are scored; None is this process.
        plan: which pieces are scored; None is all.
        journal: keeps the scores of each piece, and has those of an earlier run with the same settings.
        contexts: homologs that every protein is read after, see `context` of `score.score_variants`.

    `method`, `refresh`, `toks_per_batch` and `store` are those of `score.score_variants`.
    """
    run = VariantsRun()
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
            tuple(contexts),
        )
        for record in wanted
    ]
    task = VariantsTask(tuple(arms), refresh, toks_per_batch, store, method)
    warn_if_long((len(record.sequence) for record in wanted), turbo.model.family)
    limit = limit_of(turbo, sum(map(task.tokens, proteins)), runner)
    # Shards are merged by whole proteins.
    parts = [
        (number, part)
        for number, one in enumerate(proteins)
        for part in ([one] if plan is not None else task.parts(one, limit))
    ]
    scored = score_items(
        turbo,
        task,
        [part for _, part in parts],
        limit,
        names=[f"{wanted[number].id} {list(part.variants or ())}" for number, part in parts],
        progress=progress,
        runner=runner,
        plan=plan,
        journal=journal,
    )
    for number, found in groupby(sorted(scored), lambda index: parts[index][0]):
        record, results = wanted[number], [scored[index] for index in found]
        failed = next((one.failed for one in results if one.failed is not None), None)
        joined: dict[Arm, VariantScores] = {}
        for arm in arms if failed is None else ():
            every = [one.scores[arm] for one in results]
            joined[arm] = replace(every[0], scores=tuple(score for one in every for score in one.scores))
        if failed is None and not all(math.isfinite(x) for scores in joined.values() for x in scores.values):
            failed = "its scores are not finite; try --dtype float32"
        if failed is not None:
            run.failed.append(BadRecord(record.id, failed))
            continue
        own = own_variants[record.id]
        if variants is None:
            own = [MeasuredVariant(each.variant) for each in next(iter(joined.values())).scores]
        run.results.append(ProteinVariants(record, proteins[number].first_position, tuple(own), joined))
    return run


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
