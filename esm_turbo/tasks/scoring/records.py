"""Scoring the candidates of one file on the targets of another, as `esm-turbo score` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.files.csv_files import CsvError, CsvRow, is_table, read_csv
from esm_turbo.files.journal import Journal
from esm_turbo.files.tables import write_table
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.proteins.fasta import (
    ADD_HEADERS,
    BadRecord,
    FastaError,
    ProteinRecord,
    normalize_sequence,
    read_fasta,
)
from esm_turbo.proteins.lookup import ProteinIndex
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.options import DEFAULT_TOP_K, Arm, CandidateFill, SortBy, UnknownResidues
from esm_turbo.tasks.common.pieces import Plan, Runner, packed
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.rankings import RankAgreement
from esm_turbo.tasks.common.records import kept_columns, parse_rows
from esm_turbo.tasks.common.run_info import RUN_COLUMNS, RunInfo, run_metadata
from esm_turbo.tasks.common.scoring_task import Scored, limit_of, score_items
from esm_turbo.tasks.scoring.matrix import ScoreMatrix
from esm_turbo.tasks.scoring.pairs import ScoreTask, TargetPairs, warn_of_pairs
from esm_turbo.tasks.scoring.score import SPECIFICITY_COLUMNS, CandidateScore, Scores

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

COLUMNS = ("target", "candidate", "sequence", "arm", "rank", "pseudo_log_likelihood", "pseudo_perplexity")
TYPES: Mapping[str, type[int] | type[float]] = {
    "rank": int,
    "pseudo_log_likelihood": float,
    "pseudo_perplexity": float,
    "specificity": float,
    "specificity_z": float,
    "full_pseudo_perplexity": float,
    "full_rank": int,
}
"""Columns that hold numbers."""
RESCORED_COLUMNS = ("full_pseudo_perplexity", "full_rank")
"""Of candidates that were scored again by the arm `full`."""

# Another name of the column `sequence`.
_ALIAS = "binder"
_NOT_FINITE = "its score is not finite; try --dtype float32"
_UNKNOWN = "it holds none but unknown residues (B, X, Z); with --unknown-residues score they count"
# Columns of the targets in PepMLM's tables: of its data, and of what its script generates.
_RECEPTORS = ("Receptor Sequence", "Input Sequence", "target")


@dataclass(frozen=True)
class Candidate:
    """A candidate of a file.

    Attributes:
        id: identifier; `#N` for the N-th candidate if the file gives none.
        sequence: residues.
        target: identifier of its target; None for all targets.
        columns: all columns of its row; None if it comes from no table.
    """

    id: str
    sequence: str
    target: str | None = None
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True)
class TargetResult(Tabular):
    """Scores on one target.

    Attributes:
        target: the record.
        candidates: the candidates that were scored in every arm.
        scores: scores of these candidates by arm.
        agreement: agreement of every other arm with the reference arm.
        kept: index of each candidate among all that ran.
        sort_by: what ranks the candidates.
        rescored: scores of the best candidates by the arm `full`, by index; None if none were scored again.
    """

    target: ProteinRecord
    candidates: tuple[Candidate, ...]
    scores: Mapping[Arm, Scores]
    agreement: Mapping[Arm, RankAgreement]
    kept: tuple[int, ...] = ()
    sort_by: SortBy = "likelihood"
    rescored: Mapping[int, CandidateScore] | None = None

    def __repr__(self) -> str:
        return named(self, self.target.id, counted(len(self.candidates), "candidate"), arms=list(self.scores))

    @property
    def reference(self) -> Arm:
        """The arm that ranks the candidates and that the others are compared with: `full`, or else the first."""
        return _reference(tuple(self.scores))

    def ranking(self, arm: Arm | None = None) -> list[int]:
        """Indices of the candidates, best first, in an arm; None is the reference."""
        return self.scores[self.reference if arm is None else arm].ranking(self.sort_by)

    def rescored_ranks(self) -> dict[int, int]:
        """Rank of every candidate that was scored again among these, from 1, by index."""
        again = self.rescored or {}
        chosen = sorted(again)
        scores = replace(self.scores[self.reference], scores=tuple(again[index] for index in chosen))
        return {chosen[place]: rank for rank, place in enumerate(scores.ranking(self.sort_by), start=1)}

    def columns(self) -> tuple[str, ...]:
        """`COLUMNS`, and those of a background and of candidates that were scored again, if there are any."""
        compared = self.scores[self.reference].background is not None
        return (*COLUMNS, *(SPECIFICITY_COLUMNS * compared), *(RESCORED_COLUMNS * (self.rescored is not None)))

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Rows of `columns`, best candidate first, one row per arm; None where a candidate has no such figure."""
        ranks = {arm: {index: rank for rank, index in enumerate(self.ranking(arm), 1)} for arm in self.scores}
        full_ranks = self.rescored_ranks()
        for index in self.ranking():
            candidate = self.candidates[index]
            again: tuple[object, ...] = ()
            if self.rescored is not None:
                full = self.rescored.get(index)
                again = (None, None) if full is None else (full.pseudo_perplexity, full_ranks[index])
            for arm, scores in self.scores.items():
                one = scores.scores[index]
                figures = (ranks[arm][index], one.pseudo_log_likelihood, one.pseudo_perplexity)
                compared = () if scores.background is None else (one.specificity, one.specificity_z)
                yield self.target.id, candidate.id, candidate.sequence, arm, *figures, *compared, *again

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "target": self.target.id,
            "residues": len(self.target.sequence),
            "candidates": [{"id": one.id, "sequence": one.sequence} for one in self.candidates],
            "arms": {arm: scores.to_dict() for arm, scores in self.scores.items()},
            "agreement": {arm: one.to_dict() for arm, one in self.agreement.items()},
            "sort_by": self.sort_by,
        } | self._rescored_entry()

    def _rescored_entry(self) -> dict[str, Any]:
        if self.rescored is None:
            return {}
        ranks, before = self.rescored_ranks(), self.ranking()
        entries = [
            {
                "id": self.candidates[index].id,
                "sequence": one.candidate,
                "rank": rank,
                "full_rank": ranks[index],
                "pseudo_log_likelihood": one.pseudo_log_likelihood,
                "pseudo_perplexity": one.pseudo_perplexity,
            }
            for rank, index in enumerate(before, start=1)
            if (one := self.rescored.get(index)) is not None
        ]
        return {"rescored": entries}


@dataclass
class ScoringRun(Tabular):
    """Scores on all targets.

    Attributes:
        results: one per target that could be scored.
        failed: targets, and candidates on a target, that could not be scored.
        partial: by target of which only some candidates were to be scored here, the numbers of those that were.
    """

    results: list[TargetResult] = field(default_factory=list)
    failed: list[BadRecord] = field(default_factory=list)
    partial: dict[str, list[int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return named(self, counted(len(self.results), "target"), f"{len(self.failed):,} failed")

    def columns(self) -> list[str]:
        """Those of the results, and the other columns of the candidates."""
        others = (candidate.columns or {} for result in self.results for candidate in result.candidates)
        own = self._own_columns()
        return [*own, *kept_columns(others, [*own, "id", _ALIAS, *RUN_COLUMNS])]

    def _own_columns(self) -> tuple[str, ...]:
        return next((one.columns() for one in self.results), COLUMNS)

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Rows of `columns`, target by target, best candidate first, one row per arm."""
        others = self.columns()[len(self._own_columns()) :]
        for result in self.results:
            own = result.rows()
            for index in result.ranking():
                known = result.candidates[index].columns or {}
                for _ in result.scores:
                    yield *next(own), *(known.get(name, "") for name in others)

    def matrix(self, by: SortBy | None = None) -> ScoreMatrix:
        """The reference arm's likelihoods or specificities, see `ScoreMatrix.of`."""
        names = {one.sequence: one.id for result in self.results for one in result.candidates}
        return ScoreMatrix.of([(one.target.id, one.scores[one.reference]) for one in self.results], names, by)

    def places(self, targets: Sequence[ProteinRecord]) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        """Where the rows belong among those of all shards: numbers of targets with their rows, and `partial` by them.

        Args:
            targets: all targets of the input.
        """
        numbers = {target.id: number for number, target in enumerate(targets)}
        order = [(numbers[one.target.id], len(one.candidates) * len(one.scores)) for one in self.results]
        partial = {
            numbers[one.target.id]: [self.partial[one.target.id][index] for index in one.ranking()]
            for one in self.results
            if one.target.id in self.partial
        }
        return order, partial

    def write(
        self,
        out: str | os.PathLike[str] | TextIO,
        run: RunInfo | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `rows` to a CSV, TSV or Parquet file, atomically, or as CSV to an open file.

        Args:
            out: the file.
            run: what the run used, added in `RUN_COLUMNS`.
            settings: the run's options, JSON values, for the metadata of a Parquet file.
        """
        names: Sequence[str] = () if run is None else RUN_COLUMNS
        cells: dict[object, list[str]] = {} if run is None else {arm: run.cells(arm) for arm in run.arms}
        arm = COLUMNS.index("arm")
        rows = ([*row, *cells.get(row[arm], [])] for row in self.rows())
        write_table(out, [*self.columns(), *names], rows, TYPES, run_metadata(run, settings))


def read_candidates(
    path: str | os.PathLike[str],
    targets: Sequence[ProteinRecord] | None,
    *,
    unknown: str | None = None,
    remove_gaps: bool = False,
    accessions: bool = False,
) -> tuple[list[Candidate], list[BadRecord]]:
    """Read candidates from a FASTA file, or from the columns `sequence`, `id` and `target` of a CSV or TSV file.

    Args:
        path: the file. A table needs only the column `sequence`, or `binder`; `target` names the target of a candidate
            by identifier, UniProt accession or sequence.
        targets: the targets that candidates may name; None leaves these names unread.
        unknown: see `normalize_sequence`, as is `remove_gaps`.

    Returns:
        The good candidates and the bad ones, in the order of the file.

    Raises:
        ValueError: the file as a whole cannot be used.
    """
    if not is_table(path):
        try:
            records, bad = read_fasta(path, unknown=unknown, remove_gaps=remove_gaps, accessions=accessions)
        except FastaError as error:
            reason = error.problems[0].reason
            if not reason.endswith(ADD_HEADERS):
                raise
            reason += ", or write 'sequence' above them in a file that ends in .csv"
            raise FastaError(error.path, [BadRecord("", reason)]) from None
        return [Candidate(record.id, record.sequence) for record in records], bad
    proteins = None if targets is None else ProteinIndex(targets, "target")

    def name(row: CsvRow) -> str:
        return f"{row['id'] or 'candidate'} (line {row.line})"

    def parse(number: int, row: CsvRow) -> Candidate:
        if len(row["sequence"].split()) > 1:
            raise ValueError("has a space inside; remove it, or write two rows")
        sequence = normalize_sequence(row["sequence"], name=name(row), unknown=unknown, remove_gaps=remove_gaps)
        target = proteins.find(row["target"]).id if proteins is not None and row["target"] else None
        return Candidate(row["id"] or f"#{number}", sequence, target, row.cells)

    rows = read_csv(path, ["sequence"], ["id", "target"], {"sequence": _ALIAS})
    return parse_rows(path, rows, "candidates", name, parse)


def read_pairs(
    path: str | os.PathLike[str], *, unknown: str | None = None, remove_gaps: bool = False
) -> tuple[list[ProteinRecord], list[Candidate], list[BadRecord]]:
    """Read targets and candidates from one table, as PepMLM writes it.

    Args:
        path: a CSV or TSV file with a column `target`, `Receptor Sequence` or `Input Sequence`, which holds residues,
            and one `Binder` or `Sequence`.
        unknown: see `normalize_sequence`, as is `remove_gaps`.

    Returns:
        The targets, named `target_1` and so on in their order; the candidates, each of one of them; and the bad rows.

    Raises:
        ValueError: the file as a whole cannot be used.
    """
    if not is_table(path):
        raise CsvError(f"{os.fspath(path)}: targets alone; give candidates too, or a table of pairs (.csv or .tsv)")
    rows = read_csv(path, ["sequence"], ["id", *_RECEPTORS], {"sequence": _ALIAS})
    column = next((name for name in _RECEPTORS if any(row[name] for row in rows)), None)
    if column is None:
        raise CsvError(
            f"{os.fspath(path)}: lacks the column {' or '.join(map(repr, _RECEPTORS))}; give targets as FASTA, and this"
            " file after them"
        )
    targets: dict[str, ProteinRecord] = {}

    def name(row: CsvRow) -> str:
        return f"{row['id'] or 'candidate'} (line {row.line})"

    def parse(number: int, row: CsvRow) -> Candidate:
        one = normalize_sequence(row[column], name="its target", unknown=unknown, remove_gaps=remove_gaps)
        sequence = normalize_sequence(row["sequence"], name=name(row), unknown=unknown, remove_gaps=remove_gaps)
        target = targets.setdefault(one, ProteinRecord(f"target_{len(targets) + 1}", one))
        return Candidate(row["id"] or f"#{number}", sequence, target.id, row.cells)

    candidates, bad = parse_rows(path, rows, "candidates", name, parse)
    return list(targets.values()), candidates, bad


def score_records(
    turbo: ContextModel,
    targets: Sequence[ProteinRecord],
    candidates: Sequence[Candidate],
    arms: Sequence[Arm],
    *,
    refresh: int = DEFAULT_REFRESH,
    place: CandidateFill = "masked",
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    top_k: int = DEFAULT_TOP_K,
    unknown_residues: UnknownResidues = "omit",
    progress: Progress | None = None,
    runner: Runner | None = None,
    plan: Plan | None = None,
    journal: Journal | None = None,
) -> ScoringRun:
    """Score candidates on targets. Those that cannot be scored are set apart and reported.

    A piece is some targets with their candidates, or one target with some of many, the shortest first: up to
    `piece_limit` tokens to run, in batches filled across targets.

    Args:
        targets: the targets.
        candidates: each is scored on its own target, or on all.
        arms: one arm or several.
        top_k: number of top candidates used to compare arms.
        progress: called with stage `score` and residues on all targets in all arms, see `Progress`.
        runner: where pieces are scored; None is this process.
        plan: which pieces are scored; None is all.
        journal: keeps the scores of each piece, and has those of an earlier run with the same settings.

    `refresh`, `place`, `toks_per_batch`, `unknown_residues` and `store` are those of `score.score`.
    """
    run = ScoringRun()
    by_target: dict[str | None, list[int]] = {}
    for index, candidate in enumerate(candidates):
        by_target.setdefault(candidate.target, []).append(index)
    numbers = {t.id: sorted([*by_target.get(None, []), *by_target.get(t.id, [])]) for t in targets}
    task = ScoreTask(tuple(arms), refresh, toks_per_batch, store, place)
    lengths = [len(candidate.sequence) for candidate in candidates]
    total = sum(task.tokens_of(len(t.sequence), lengths[number]) for t in targets for number in numbers[t.id])
    limit = limit_of(turbo, total, runner)
    parts: list[tuple[ProteinRecord, tuple[int, ...]]] = []
    for target in targets:
        shortest_first = sorted(numbers[target.id], key=lengths.__getitem__)
        tokens = [task.tokens_of(len(target.sequence), lengths[number]) for number in shortest_first]
        parts += [(target, tuple(sorted(own))) for own in packed(shortest_first, tokens, limit)]
    pairs = [TargetPairs(t.sequence, tuple(candidates[number].sequence for number in own)) for t, own in parts]
    warn_of_pairs(turbo, pairs)
    scored = score_items(
        turbo,
        task,
        pairs,
        limit,
        names=[f"{target.id} {own}" for target, own in parts],
        progress=progress,
        runner=runner,
        plan=plan,
        journal=journal,
    )
    found: dict[str, list[tuple[Sequence[int], Scored[Scores]]]] = {}
    for index, one in scored.items():
        target, own = parts[index]
        found.setdefault(target.id, []).append((own, one))
    for target in targets:
        of_target = found.get(target.id, [])
        if not of_target:
            continue
        reasons = dict.fromkeys(one.failed for _, one in of_target if one.failed is not None)
        run.failed += [BadRecord(target.id, reason) for reason in reasons]
        if reasons:
            continue
        here = sorted(number for own, _ in of_target for number in own)
        joined = {arm: one.with_unknown(unknown_residues) for arm, one in _joined(of_target, here, arms).items()}
        result, failed = _result(target, [candidates[index] for index in here], joined, top_k)
        run.failed += failed
        if result is not None:
            run.results.append(result)
            if len(here) < len(numbers[target.id]):
                run.partial[target.id] = [here[index] for index in result.kept]
    return run


def _joined(
    parts: Sequence[tuple[Sequence[int], Scored[Scores]]], numbers: Sequence[int], arms: Sequence[Arm]
) -> dict[Arm, Scores]:
    """The scores of all pieces of a target, in the order of the candidates' numbers."""
    joined = {}
    for arm in arms:
        by_number = {
            number: one for own, scored in parts for number, one in zip(own, scored.scores[arm].scores, strict=True)
        }
        joined[arm] = replace(parts[0][1].scores[arm], scores=tuple(by_number[number] for number in numbers))
    return joined


def _result(
    target: ProteinRecord, candidates: Sequence[Candidate], all_scores: Mapping[Arm, Scores], top_k: int
) -> tuple[TargetResult | None, list[BadRecord]]:
    """The result of the candidates whose scores are finite in every arm, and the other candidates."""
    finite = [all(s.scores[i].is_finite() for s in all_scores.values()) for i in range(len(candidates))]
    failed = [
        BadRecord(
            f"{c.id} on {target.id}", _NOT_FINITE if next(iter(all_scores.values())).scores[i].scored else _UNKNOWN
        )
        for i, c in enumerate(candidates)
        if not finite[i]
    ]
    kept = [i for i, ok in enumerate(finite) if ok]
    if not kept:
        return None, failed
    scores = {arm: replace(s, scores=tuple(s.scores[i] for i in kept)) for arm, s in all_scores.items()}
    reference = _reference(tuple(scores))
    agreement = {arm: one.agreement(scores[reference], top_k) for arm, one in scores.items() if arm != reference}
    return TargetResult(target, tuple(candidates[i] for i in kept), scores, agreement, tuple(kept)), failed


def _reference(arms: Sequence[Arm]) -> Arm:
    return "full" if "full" in arms else arms[0]
