"""Scoring the candidates of one file on the targets of another, as `esm-turbo score` does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Self

from esm_turbo.files.csv_files import CsvError, CsvRow, is_table, read_csv
from esm_turbo.files.journal import Journal
from esm_turbo.files.tabular import counted, named
from esm_turbo.proteins.fasta import (
    ADD_HEADERS,
    BadRecord,
    FastaError,
    ProteinRecord,
    check_identifiers,
    normalize_sequence,
    read_fasta,
)
from esm_turbo.proteins.lookup import ProteinIndex
from esm_turbo.tasks.common.options import DEFAULT_TOP_K, Arm, SortBy
from esm_turbo.tasks.common.pieces import Plan, Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.rankings import RankAgreement
from esm_turbo.tasks.common.record_results import RecordResult, RecordRun
from esm_turbo.tasks.common.records import parse_rows
from esm_turbo.tasks.common.scoring_task import Scored, score_items
from esm_turbo.tasks.scoring.matrix import ScoreMatrix
from esm_turbo.tasks.scoring.pairs import ScoreTask, TargetPairs, warn_of_pairs
from esm_turbo.tasks.scoring.score import SPECIFICITY_COLUMNS, CandidateScore, Scores, check_candidates

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

COLUMNS = ("target", "candidate", "sequence", "arm", "rank", "pseudo_log_likelihood", "pseudo_perplexity")
COLUMN_TYPES: Mapping[str, type[int] | type[float]] = {
    "rank": int,
    "pseudo_log_likelihood": float,
    "pseudo_perplexity": float,
    "specificity": float,
    "specificity_z": float,
    "full_pseudo_perplexity": float,
    "full_specificity": float,
    "full_specificity_z": float,
    "full_rank": int,
}
"""Columns that hold numbers."""

BACKGROUND_COLUMN = "run_background"
"""Column of what candidates are compared with."""

# Identifiers of candidates whose file gives none.
_NUMBERED = re.compile(r"#\d+", re.ASCII)
# Residues of a candidate that a label shows.
_LABEL = 24
# Columns of identifiers: of a file, and of a table that a run wrote.
_NAMES = ("id", "candidate")
# Another name of the column `sequence`.
_ALIAS = "binder"
# What libraries write for a cell without a value; in capitals they are peptides.
_NOTHING = {"nan", "NaN", "None", "null"}
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
        columns: the other columns of its row; None if it comes from no table.
    """

    id: str
    sequence: str
    target: str | None = None
    columns: Mapping[str, str] | None = None

    @property
    def name(self) -> str | None:
        """Its identifier; None if the file gives none."""
        return None if _NUMBERED.fullmatch(self.id) else self.id

    @property
    def label(self) -> str:
        """A short text to show it by: its name, or else its `residues`."""
        return self.name or self.residues

    @property
    def residues(self) -> str:
        """Its sequence, or of a long one both ends and the identifier."""
        if len(self.sequence) <= _LABEL:
            return self.sequence
        return f"{self.sequence[:10]}...{self.sequence[-5:]} {self.id}"


@dataclass(frozen=True)
class TargetResult(RecordResult):
    """Scores on one target.

    Attributes:
        target: the record.
        candidates: the candidates that were scored in every arm.
        scores: scores of these candidates by arm.
        agreement: agreement of every other arm with the reference arm.
        numbers: see `RecordResult`.
    """

    target: ProteinRecord
    candidates: tuple[Candidate, ...]
    scores: Mapping[Arm, Scores]
    agreement: Mapping[Arm, RankAgreement]
    numbers: Sequence[int] | None = None

    scored = "candidates"

    def __repr__(self) -> str:
        return named(self, self.target.id, counted(len(self.candidates), "candidate"), arms=list(self.scores))

    @property
    def record(self) -> ProteinRecord:
        """The target."""
        return self.target

    @property
    def reference(self) -> Arm:
        """The arm that ranks the candidates and that the others are compared with: `full`, or else the first."""
        return _reference(self.scores)

    @property
    def sort_by(self) -> SortBy:
        """What ranks the candidates."""
        return self.scores[self.reference].sort_by

    def ranking(self, arm: Arm | None = None) -> list[int]:
        """Indices of the candidates, best first, in an arm; None is the reference."""
        return self.scores[self.reference if arm is None else arm].ranking()

    @property
    def rescored(self) -> Mapping[int, CandidateScore] | None:
        """Scores of the best candidates by the arm `full`, by index; None if none were scored again."""
        return self.scores[self.reference].rescored

    def columns(self) -> tuple[str, ...]:
        """`COLUMNS`, and those of a background and of candidates that were scored again, if there are any."""
        scores = self.scores[self.reference]
        compared = () if scores.background is None else (*SPECIFICITY_COLUMNS, BACKGROUND_COLUMN)
        return (*COLUMNS, *compared, *scores.rescored_columns())

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Rows of `columns`, best candidate first, one row per arm; None where a candidate has no such figure."""
        ranks = {arm: {index: rank for rank, index in enumerate(self.ranking(arm), 1)} for arm in self.scores}
        exact = self.scores[self.reference].rescored_cells()
        background = self.scores[self.reference].compared_with
        for index in self.ranking():
            candidate = self.candidates[index]
            for arm, scores in self.scores.items():
                one = scores.scores[index]
                figures = (ranks[arm][index], one.pseudo_log_likelihood, one.pseudo_perplexity)
                compared = () if scores.background is None else (one.specificity, one.specificity_z, background)
                yield self.target.id, candidate.id, candidate.sequence, arm, *figures, *compared, *exact[index]

    def given(self) -> Iterator[Mapping[str, str]]:
        """Columns of the candidate of each row."""
        for index in self.ranking():
            yield from repeat(self.candidates[index].columns or {}, len(self.scores))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values: dict[str, Any] = {
            "target": self.target.id,
            "residues": len(self.target.sequence),
            "candidates": [{"id": one.id, "sequence": one.sequence} for one in self.candidates],
            "arms": {arm: scores.to_dict() for arm, scores in self.scores.items()},
            "agreement": {arm: one.to_dict() for arm, one in self.agreement.items()},
            "sort_by": self.sort_by,
        }
        if self.rescored is not None:
            scores = self.scores[self.reference]
            columns, exact = scores.rescored_columns(), scores.rescored_cells()
            values["rescored"] = [
                {
                    "id": self.candidates[index].id,
                    "sequence": one.candidate,
                    "rank": rank,
                    "pseudo_log_likelihood": one.pseudo_log_likelihood,
                    "pseudo_perplexity": one.pseudo_perplexity,
                    **dict(zip(columns, exact[index], strict=True)),
                }
                for rank, index in enumerate(self.ranking(), start=1)
                if (one := self.rescored.get(index)) is not None
            ]
        return values

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> Self:
        """See `RecordResult.from_state`; arms are not compared."""
        candidates = tuple(Candidate(**one) for one in values["candidates"])
        scores = {arm: Scores.from_dict(one) for arm, one in values["scores"].items()}
        return cls(ProteinRecord(**values["target"]), candidates, scores, {}, values["numbers"])


@dataclass(repr=False)
class ScoringRun(RecordRun[TargetResult]):
    """Scores on all targets, see `RecordRun`; what failed are targets, and candidates on a target."""

    noun, result_class = "target", TargetResult
    no_columns = COLUMNS
    more_columns = (BACKGROUND_COLUMN,)
    types = COLUMN_TYPES

    def matrix(self, by: SortBy | None = None) -> ScoreMatrix:
        """The reference arm's likelihoods or specificities, see `ScoreMatrix.of`; None is the number that ranks."""
        number = by or next((one.sort_by for one in self.results), None)
        scores = [(one.target.id, one.scores[one.reference]) for one in self.results]
        return ScoreMatrix.of(scores, self.candidate_names(), number)

    def candidate_names(self) -> dict[str, str]:
        """Names of candidates by their residues: all identifiers of one that has several, or the residues."""
        own: dict[str, dict[str, None]] = {}
        for one in (candidate for result in self.results for candidate in result.candidates):
            own.setdefault(one.sequence, {})[one.name or one.sequence] = None
        return {sequence: ", ".join(identifiers) for sequence, identifiers in own.items()}


def read_candidates(
    path: str | os.PathLike[str],
    targets: Sequence[ProteinRecord] | None,
    *,
    unknown: str | None = None,
    remove_gaps: bool = False,
    accessions: bool = False,
) -> tuple[list[Candidate], list[BadRecord]]:
    """Read candidates from a FASTA file, a list, or the columns `sequence`, `id` and `target` of a CSV or TSV file.

    Args:
        path: the file. A list ends in `.txt` and has one sequence per line. A table needs only the column `sequence`,
            or `binder`; `id`, or `candidate` as in a table of scores, names it, and `target` its target by identifier,
            UniProt accession or sequence.
        targets: the targets that candidates may name; None leaves these names unread.
        unknown: see `normalize_sequence`, as is `remove_gaps`.

    Returns:
        The good candidates and the bad ones, in the order of the file.

    Raises:
        ValueError: the file as a whole cannot be used.
    """
    if not is_table(path):
        try:
            records, bad = read_fasta(path, unknown=unknown, remove_gaps=remove_gaps, accessions=accessions, lists=True)
        except FastaError as error:
            reason = error.problems[0].reason
            if not reason.endswith(ADD_HEADERS):
                raise
            reason += ", or give the file a name that ends in .txt"
            raise FastaError(error.path, [BadRecord("", reason)]) from None
        return [Candidate(record.id, record.sequence) for record in records], bad
    proteins = None if targets is None else ProteinIndex(targets, "target")

    def target_of(row: CsvRow) -> str | None:
        return proteins.find(row["target"]).id if proteins is not None and row["target"] else None

    rows = read_csv(path, ["sequence"], [*_NAMES, "target"], {"sequence": _ALIAS})
    return _parsed(path, rows, target_of, [] if proteins is None else ["target"], unknown, remove_gaps)


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
    rows = read_csv(path, ["sequence"], [*_NAMES, *_RECEPTORS], {"sequence": _ALIAS})
    named = [name for name in _RECEPTORS if any(row[name] for row in rows)]
    # Their own tables may name targets as well.
    if len(both := [name for name in named if name != "target"]) > 1:
        raise CsvError(
            f"{os.fspath(path)}: has the columns {both[0]!r} and {both[1]!r}, which mean the same; remove or rename one"
        )
    column = next(iter(named), None)
    if column is None:
        raise CsvError(
            f"{os.fspath(path)}: lacks the column {' or '.join(map(repr, _RECEPTORS))}; give targets as FASTA, and this"
            " file after them"
        )
    targets: dict[str, ProteinRecord] = {}

    def target_of(row: CsvRow) -> str:
        residues = normalize_sequence(row[column], name="its target", unknown=unknown, remove_gaps=remove_gaps)
        return targets.setdefault(residues, ProteinRecord(f"target_{len(targets) + 1}", residues)).id

    candidates, bad = _parsed(path, rows, target_of, [column], unknown, remove_gaps)
    return list(targets.values()), candidates, bad


def _parsed(
    path: str | os.PathLike[str],
    rows: Sequence[CsvRow],
    target_of: Callable[[CsvRow], str | None],
    read: Collection[str],
    unknown: str | None,
    remove_gaps: bool,
) -> tuple[list[Candidate], list[BadRecord]]:
    """Candidates of the rows of a table, see `read_candidates`.

    Args:
        target_of: returns the identifier of their target.
        read: columns that `target_of` reads.
    """

    def id_column(row: CsvRow) -> str:
        return next((name for name in _NAMES if row[name]), _NAMES[0])

    names = set(map(id_column, rows))
    both = next((row.line for row in rows if all(row[name] for name in _NAMES)), None)
    if len(names) > 1 and both is not None:
        reason = f"line {both} has an 'id' and a 'candidate', other rows one of both; leave one"
        raise CsvError(f"{os.fspath(path)}: {reason}")

    def name(row: CsvRow) -> str:
        return f"{row[id_column(row)] or 'candidate'} (line {row.line})"

    def parse(number: int, row: CsvRow) -> Candidate:
        if row["sequence"] in _NOTHING:
            raise ValueError(f"says {row['sequence']!r}, which stands for no sequence")
        if len(row["sequence"].split()) > 1:
            raise ValueError("has a space inside; remove it, or write two rows")
        sequence = normalize_sequence(row["sequence"], name=name(row), unknown=unknown, remove_gaps=remove_gaps)
        others = row.without("sequence", _ALIAS, *read, *names)
        return Candidate(row[id_column(row)] or f"#{number}", sequence, target_of(row), others)

    return parse_rows(path, rows, "candidates", name, parse)


def score_records(
    turbo: ContextModel,
    targets: Sequence[ProteinRecord],
    candidates: Sequence[Candidate],
    arms: Sequence[Arm],
    *,
    top_k: int = DEFAULT_TOP_K,
    sort_by: SortBy = "likelihood",
    stage: str = "score",
    progress: Progress | None = None,
    runner: Runner | None = None,
    plan: Plan | None = None,
    journal: Journal | None = None,
    **options: Any,
) -> ScoringRun:
    """Score candidates on targets. Those that cannot be scored are set apart and reported.

    Args:
        targets: the targets.
        candidates: each is scored on its own target, or on all.
        arms: one arm or several.
        top_k: number of top candidates used to compare arms.
        sort_by: what ranks the candidates.
        stage: name of what is done, for those who wait.
        progress: called with the stage and residues on all targets in all arms, see `Progress`.
        runner: as of `score_items`, as are `plan` and `journal`.
        **options: of a `ScoreTask`.

    Raises:
        ValueError: an identifier names two targets, or as of `score_items`.
    """
    targets, candidates = list(targets), list(candidates)
    check_identifiers(targets)
    run, wrong = ScoringRun(), _wrong(turbo, [one.sequence for one in candidates])
    run.failed += [BadRecord(one.id, wrong[one.sequence]) for one in candidates if one.sequence in wrong]
    candidates = [one for one in candidates if one.sequence not in wrong]
    by_target: dict[str | None, list[int]] = {}
    for index, candidate in enumerate(candidates):
        by_target.setdefault(candidate.target, []).append(index)
    numbers = {t.id: sorted([*by_target.get(None, []), *by_target.get(t.id, [])]) for t in targets}
    given = [(target, [candidates[index] for index in numbers[target.id]]) for target in targets if numbers[target.id]]
    pairs = [TargetPairs(target.sequence, [one.sequence for one in own]) for target, own in given]
    warn_of_pairs(turbo, pairs)
    scored = score_items(
        turbo,
        ScoreTask(tuple(arms), **options),
        pairs,
        names=[target.id for target, _ in given],
        stage=stage,
        progress=progress,
        runner=runner,
        plan=plan,
        journal=journal,
    )
    for index, one in scored.items():
        target, own = given[index]
        if one.failed is None:
            _add_result(run, target, own, one, top_k, sort_by)
        else:
            run.lose(target, one.failed)
    return run


def _wrong(turbo: ContextModel, sequences: Iterable[str]) -> dict[str, str]:
    """What is wrong with candidates, of those that are not residues alone; unknown residues are told later."""
    wrong = {}
    for sequence in dict.fromkeys(sequences):
        try:
            check_candidates(turbo.codes, [sequence], "score")
        except ValueError as error:
            wrong[sequence] = str(error).removeprefix("candidate 1: ")
    return wrong


def _add_result(
    run: ScoringRun,
    target: ProteinRecord,
    candidates: Sequence[Candidate],
    scored: Scored[Scores],
    top_k: int,
    sort_by: SortBy,
) -> None:
    """Add the candidates whose scores are finite in every arm to the results, and the others to what failed."""
    numbers = range(len(candidates)) if scored.numbers is None else scored.numbers
    kept = []
    for at, number in enumerate(numbers):
        own = [scores.scores[at] for scores in scored.scores.values()]
        if all(one.is_finite() for one in own):
            kept.append(at)
        else:
            reason = _NOT_FINITE if own[0].scored else _UNKNOWN
            run.failed.append(BadRecord(f"{candidates[number].id} on {target.id}", reason))
    if not kept:
        return
    chosen = tuple(numbers[at] for at in kept)
    scores = {
        arm: replace(s, scores=tuple(s.scores[at] for at in kept), sort_by=sort_by) for arm, s in scored.scores.items()
    }
    first = scores[_reference(scores)]
    agreement = {arm: one.agreement(first, top_k) for arm, one in scores.items() if one is not first}
    some = chosen if len(numbers) < len(candidates) else None
    run.results.append(TargetResult(target, tuple(candidates[n] for n in chosen), scores, agreement, some))


def _reference(arms: Iterable[Arm]) -> Arm:
    return "full" if "full" in (known := list(arms)) else known[0]
