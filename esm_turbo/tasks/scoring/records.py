"""Candidates of a file scored on the targets of another: what `esm-turbo score` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.files.csv_files import CsvError, is_csv, read_csv, write_csv
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord, normalize_sequence, read_fasta
from esm_turbo.tasks.common.memory import NotEnoughMemoryError
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.progress import Progress, silent
from esm_turbo.tasks.common.rankings import TOP_K, RankAgreement
from esm_turbo.tasks.scoring.score import Scores, score

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

COLUMNS = ("target", "candidate", "sequence", "arm", "rank", "pseudo_log_likelihood", "pseudo_perplexity")


@dataclass(frozen=True)
class Candidate:
    """A candidate of a file.

    Attributes:
        id: identifier; `#N` for the N-th candidate of a file that has none.
        sequence: residues.
        target: identifier of the target that it is for; None for all.
    """

    id: str
    sequence: str
    target: str | None = None


@dataclass(frozen=True)
class TargetResult:
    """What was found on one target.

    Attributes:
        target: the record.
        candidates: those that were scored in every arm.
        scores: by arm, one a candidate.
        agreement: of every other arm with the reference, which is `full` or else the first.
    """

    target: ProteinRecord
    candidates: tuple[Candidate, ...]
    scores: Mapping[Arm, Scores]
    agreement: Mapping[Arm, RankAgreement]

    @property
    def reference(self) -> Arm:
        """The arm that candidates are ranked by, and that the others are compared with."""
        return _reference(tuple(self.scores))

    def ranking(self) -> list[int]:
        """Indices of the candidates, the best first."""
        return self.scores[self.reference].ranking()

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Lines of `COLUMNS`, the best candidates first, one for every arm."""
        ranks = {arm: {index: rank for rank, index in enumerate(s.ranking(), 1)} for arm, s in self.scores.items()}
        for index in self.ranking():
            candidate = self.candidates[index]
            for arm, scores in self.scores.items():
                one = scores.scores[index]
                figures = (ranks[arm][index], one.pseudo_log_likelihood, one.pseudo_perplexity)
                yield self.target.id, candidate.id, candidate.sequence, arm, *figures

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "target": self.target.id,
            "residues": len(self.target.sequence),
            "candidates": [{"id": one.id, "sequence": one.sequence} for one in self.candidates],
            "arms": {arm: scores.to_dict() for arm, scores in self.scores.items()},
            "agreement": {arm: one.to_dict() for arm, one in self.agreement.items()},
        }


@dataclass
class ScoringRun:
    """What was found on all targets.

    Attributes:
        results: one a target that could be done.
        failed: targets, and candidates on targets, that could not.
    """

    results: list[TargetResult] = field(default_factory=list)
    failed: list[BadRecord] = field(default_factory=list)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes `COLUMNS` of all results to a CSV file, whole or not at all."""
        write_csv(path, COLUMNS, (row for result in self.results for row in result.rows()))


def read_candidates(
    path: str | os.PathLike[str], targets: Sequence[ProteinRecord], *, unknown: str | None = None
) -> tuple[list[Candidate], list[BadRecord]]:
    """Reads candidates from a FASTA file, or from the columns `sequence`, `id` and `target` of a CSV file.

    Args:
        path: the file. Of a CSV file only the column `sequence` is needed; `target` names the target that a candidate
            is for.
        targets: that candidates may be for.
        unknown: `"X"` to replace letters that are no residues by X.

    Returns:
        The good candidates and the bad ones, in the order of the file.

    Raises:
        ValueError: the file as a whole cannot be used.
    """
    if not is_csv(path):
        records, bad = read_fasta(path, unknown=unknown)
        return [Candidate(record.id, record.sequence) for record in records], bad
    known = {target.id for target in targets}
    good: list[Candidate] = []
    bad = []
    for number, row in enumerate(read_csv(path, ["sequence"], ["id", "target"]), start=1):
        name = f"{row['id'] or 'candidate'} (line {row.line})"
        try:
            sequence = normalize_sequence(row["sequence"], name=name, unknown=unknown)
        except ValueError as error:
            bad.append(BadRecord(name, str(error).removeprefix(f"{name}: ")))
            continue
        if row["target"] and row["target"] not in known:
            bad.append(BadRecord(name, f"there is no usable target {row['target']!r}; correct it, or leave it empty"))
            continue
        good.append(Candidate(row["id"] or f"#{number}", sequence, row["target"] or None))
    if not good and not bad:
        raise CsvError(f"{os.fspath(path)}: holds no candidates; give at least one below the names of the columns")
    return good, bad


def score_records(
    turbo: ContextModel,
    targets: Sequence[ProteinRecord],
    candidates: Sequence[Candidate],
    arms: Sequence[Arm],
    *,
    top_k: int = TOP_K,
    progress: Progress | None = None,
    **options: Any,
) -> ScoringRun:
    """Scores candidates on targets; what cannot be done is set apart, and the rest is done.

    Args:
        turbo: the model.
        targets: one after the other.
        candidates: each on its target, or on all.
        arms: one or several.
        top_k: how many of the best the arms' rankings are compared by.
        progress: called with stage `score` and residues on all targets in all arms, see `Progress`.
        **options: as of `scoring.score`.
    """
    run, report = ScoringRun(), progress or silent
    done = 0
    total = len(arms) * sum(len(c.sequence) for target in targets for c in _candidates_of(target, candidates))
    for target in targets:
        own = _candidates_of(target, candidates)
        if not own:
            continue
        found: dict[Arm, Scores] = {}
        for arm in arms:
            start = done

            def advance(stage: str, part: int, whole: int, start: int = start) -> None:
                report(stage, start + part, total)

            try:
                found[arm] = score(
                    turbo, target.sequence, [c.sequence for c in own], arm=arm, progress=advance, **options
                )
            except (NotEnoughMemoryError, torch.OutOfMemoryError) as error:
                run.failed.append(BadRecord(target.id, str(error)))
                break
            done += sum(len(c.sequence) for c in own)
        else:
            result, failed = _result(target, own, found, top_k)
            run.failed += failed
            if result is not None:
                run.results.append(result)
    return run


def _candidates_of(target: ProteinRecord, candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.target in (None, target.id)]


def _result(
    target: ProteinRecord, candidates: Sequence[Candidate], found: Mapping[Arm, Scores], top_k: int
) -> tuple[TargetResult | None, list[BadRecord]]:
    """The finite scores, and the candidates that have others."""
    kept = [i for i in range(len(candidates)) if all(s.scores[i].is_finite() for s in found.values())]
    reason = "its score is not finite; try --dtype float32"
    failed = [BadRecord(f"{c.id} on {target.id}", reason) for i, c in enumerate(candidates) if i not in set(kept)]
    if not kept:
        return None, failed
    scores = {
        arm: Scores(tuple(s.scores[i] for i in kept), s.arm, s.preset, s.place, s.refresh) for arm, s in found.items()
    }
    reference = _reference(tuple(scores))
    agreement = {arm: one.agreement(scores[reference], top_k) for arm, one in scores.items() if arm != reference}
    return TargetResult(target, tuple(candidates[i] for i in kept), scores, agreement), failed


def _reference(arms: Sequence[Arm]) -> Arm:
    return "full" if "full" in arms else arms[0]
