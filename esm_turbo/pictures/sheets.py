"""The sheets of each kind of result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from esm_turbo.binders import Binders
from esm_turbo.calibration import Calibration
from esm_turbo.evaluate.evaluation import Evaluation
from esm_turbo.pictures.logo import LOGO, design_frequencies, design_tracks, logo_sheet
from esm_turbo.pictures.measurements import calibration_sheet, evaluation_sheet
from esm_turbo.pictures.panels import Sheet, Table, Tracks
from esm_turbo.pictures.ranking import matrix_sheet, ranking_sheet
from esm_turbo.pictures.variant_map import variant_sheet
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.run_info import RunInfo
from esm_turbo.tasks.generation.generate import GenerationOutput
from esm_turbo.tasks.generation.notation import tokens_of
from esm_turbo.tasks.generation.records import GeneratedSequence
from esm_turbo.tasks.scoring.records import Candidate, ScoringRun, TargetResult
from esm_turbo.tasks.scoring.score import Scores
from esm_turbo.tasks.variants.records import MeasuredVariant, ProteinVariants, VariantsRun
from esm_turbo.tasks.variants.score import VariantScores


def sheets_of(result: Any, run: RunInfo | None, given: Sequence[ProteinRecord] = ()) -> list[Sheet]:
    """One sheet for each protein or target of a result.

    Args:
        result: see `draw`.
        run: what made it.
        given: the input proteins of designs, to compare with.

    Raises:
        TypeError: it is of no known kind.
    """
    if isinstance(result, list):
        return _designs(result, run, given)
    for kind, sheets in _SHEETS.items():
        if isinstance(result, kind):
            return sheets(result, run)
    raise TypeError(f"`draw` draws {', '.join(kind.__name__ for kind in _SHEETS)}, list; got {type(result).__name__}")


def _designs(
    designs: Sequence[GeneratedSequence], run: RunInfo | None, given: Sequence[ProteinRecord] = ()
) -> list[Sheet]:
    """A sheet for each input protein; those of one protein lie one after the other."""
    sequences = {record.id: record.sequence for record in given}
    groups = groupby(designs, lambda one: (one.record, one.positions))
    used = "designs" if run is None else str(run)
    return [logo_sheet(list(own), sequences.get(record, ""), used) for (record, _), own in groups]


def _binders(found: Binders, run: RunInfo | None, target: str = "target") -> Sheet:
    """The logo of the peptides for a target, all of one length, above their ranking."""
    candidates = tuple(Candidate(f"#{rank}", one.sequence) for rank, one in enumerate(found.binders, start=1))
    record, scores = ProteinRecord(target, found.target), {found.arm: found.scores}
    ranking = ranking_sheet(TargetResult(record, candidates, scores, {}), _used(run, scores))
    log_probs = np.array([one.score.log_probabilities for one in found.binders])
    positions = range(1, log_probs.shape[1] + 1)
    tracks = design_tracks(design_frequencies([one.sequence for one in found.binders]), log_probs, positions)
    logo = Tracks(tracks, positions, [""] * len(positions))
    caption = f"{ranking.caption} Above: {LOGO[0].lower() + LOGO[1:]}; mean log p is that of the ranking."
    table = Table(found.columns(), list(found.rows()))
    return Sheet(ranking.title, caption, [logo, *ranking.layout], table)


def _used(run: RunInfo | None, scores: Mapping[Arm, Scores | VariantScores]) -> str:
    """The caption's description of a run."""
    if run is not None:
        return str(run)
    named = [arm if one.preset is None else f"{arm} (preset {one.preset})" for arm, one in scores.items()]
    model = next(iter(scores.values())).model
    return f"model {model}, arm{'s' if len(named) > 1 else ''} {', '.join(named)}"


def _variants(result: ProteinVariants, run: RunInfo | None) -> Sheet:
    return variant_sheet(result, _used(run, result.scores))


def _ranking(result: TargetResult, run: RunInfo | None) -> Sheet:
    return ranking_sheet(result, _used(run, result.scores))


def _screen(found: ScoringRun, run: RunInfo | None) -> list[Sheet]:
    """All targets together, and each."""
    together = matrix_sheet(found, _used(run, found.results[0].scores)) if found.results else None
    return [*([] if together is None else [together]), *(_ranking(one, run) for one in found.results)]


def _protein_of(scores: VariantScores) -> ProteinVariants:
    variants = tuple(MeasuredVariant(one.variant) for one in scores.scores)
    wild_type = ProteinRecord("protein", scores.wild_type)
    return ProteinVariants(wild_type, scores.first_position, variants, {scores.arm: scores})


def _target_of(scores: Scores) -> TargetResult:
    candidates = tuple(Candidate(f"#{n}", one.candidate) for n, one in enumerate(scores.scores, start=1))
    return TargetResult(ProteinRecord("target", ""), candidates, {scores.arm: scores}, {})


def _designs_of(output: GenerationOutput, run: RunInfo | None) -> list[Sheet]:
    """Rows with the same positions, and the same residues elsewhere, are designs of one protein."""

    def fixed(row: int) -> tuple[list[int], str]:
        sequence = tokens_of(output.sequences[row])
        for position in output.positions[row]:
            sequence[position - 1] = "-"
        return output.positions[row], "".join(sequence)

    sheets = []
    for number, (_, rows) in enumerate(groupby(range(len(output.sequences)), fixed), start=1):
        designs = [
            GeneratedSequence(
                f"protein {number}", sample, output.sequences[row], output.positions[row], output.log_probs[row], None
            )
            for sample, row in enumerate(rows, start=1)
        ]
        sheets += _designs(designs, run)
    return sheets


_SHEETS: dict[type, Callable[[Any, RunInfo | None], list[Sheet]]] = {
    VariantScores: lambda scores, run: [_variants(_protein_of(scores), run)],
    ProteinVariants: lambda result, run: [_variants(result, run)],
    VariantsRun: lambda found, run: [_variants(one, run) for one in found.results],
    Scores: lambda scores, run: [_ranking(_target_of(scores), run)],
    TargetResult: lambda result, run: [_ranking(result, run)],
    ScoringRun: _screen,
    Binders: lambda found, run: [_binders(found, run)],
    dict: lambda found, run: [_binders(one, run, target) for target, one in found.items()],
    GenerationOutput: _designs_of,
    Evaluation: lambda result, run: [evaluation_sheet(result)],
    Calibration: lambda calibration, run: [calibration_sheet(calibration)],
}
