"""Reports of `esm-turbo score` and `esm-turbo variants`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from esm_turbo.files.tabular import counted
from esm_turbo.files.text_tables import text_table

if TYPE_CHECKING:
    from rich.table import Table

    from esm_turbo.tasks.common.options import Arm
    from esm_turbo.tasks.common.rankings import RankAgreement
    from esm_turbo.tasks.scoring.records import ScoringRun, TargetResult
    from esm_turbo.tasks.scoring.score import Scores
    from esm_turbo.tasks.variants.records import ProteinVariants, VariantsRun

# Proteins, or targets, up to which each is shown by itself, and how many of its best.
_FEW, _TOP = 3, 10
_UNIT = "log-probability of the mutant minus that of the wild type, nats"
_APPROXIMATE = "compare ranks: single values are approximate"
# Proteins that a summary of many shows.
_ROWS = 20


def score_report(run: ScoringRun, top: int | None) -> list[object]:
    """The best candidates of every target, and the agreement of the arms.

    Args:
        run: the scores.
        top: number of candidates per target, none for 0; None shows those of a few targets, and of many a summary.
    """
    few = top is not None or len(run.results) <= _FEW
    shown = _TOP if top is None else top
    parts: list[object] = [_target_table(result, shown) for result in run.results if few and shown]
    if not few:
        parts.append(_targets_summary(run.results))
    if any(result.agreement for result in run.results):
        parts.append(_agreement_table(run.results, few))
    exact = any(one.rescored or "full" in one.scores for one in run.results)
    if not exact and parts and run.results:
        parts.append(f"{_APPROXIMATE}; --rescore, or --arm full, computes them exactly")
    return parts


def variants_report(run: VariantsRun, top: int | None) -> list[object]:
    """The top-scoring variants of every protein, and the correlations of the arms.

    Args:
        run: the scores.
        top: number of variants per protein; None shows those of a few proteins, and of many a summary.
    """
    if top is None and len(run.results) > _FEW:
        return [_variants_summary(run.results)]
    shown = _TOP if top is None else top
    parts = [part for result in run.results for part in _variants_of(result, shown)]
    exact = any("full" in one.scores for one in run.results)
    return parts if exact or not parts else [*parts, f"{_APPROXIMATE}; --arm full computes them exactly"]


def _variants_of(result: ProteinVariants, top: int) -> Iterator[object]:
    arms = list(result.scores)
    method = result.scores[result.reference].method_name
    yield f"{result.wild_type.id}: {counted(len(result.variants), 'variant')}, {method}"
    correlations = _Correlations.of([result])
    if correlations.columns:
        rows = [[arm, result.scores[arm].preset or "-", *correlations.cells(result, arm)] for arm in arms]
        yield text_table("", ["arm", "stored as", *correlations.columns], rows)
    order = result.ranking()[:top]
    if order:
        measured = any(result.variants[i].measured is not None for i in order)
        rows = []
        for i in order:
            scores = [_number(result.scores[arm].values[i]) for arm in arms]
            rows.append([result.variants[i].variant, *([_number(result.variants[i].measured)] * measured), *scores])
        yield text_table(
            f"top {len(order)} by {result.reference}",
            ["variant", *(["measured"] * measured), *arms],
            rows,
            caption=_UNIT,
        )


def _variants_summary(results: Sequence[ProteinVariants]) -> Table:
    """One row per protein and arm."""
    correlations = _Correlations.of(results)
    rows = []
    for result in results[:_ROWS]:
        for arm, scores in result.scores.items():
            best = max(range(len(result.variants)), key=scores.values.__getitem__)
            mean = _number(fmean(scores.values))
            cells = [
                f"{len(result.variants):,}",
                arm,
                mean,
                result.variants[best].variant,
                _number(scores.values[best]),
            ]
            rows.append([result.wild_type.id, *cells, *correlations.cells(result, arm)])
    columns = ["protein", "variants", "arm", "mean score", "best variant", "its score", *correlations.columns]
    return text_table(
        f"{len(results):,} proteins, {results[0].scores[results[0].reference].method_name}",
        columns,
        rows,
        left=(0, 2, 4),
        caption=_rest(len(results)) or f"score: {_UNIT}",
    )


@dataclass(frozen=True)
class _Correlations:
    """Columns of rank correlations, those that are defined for any of the results."""

    measured: bool
    full: bool

    @classmethod
    def of(cls, results: Sequence[ProteinVariants]) -> _Correlations:
        arms = list(results[0].scores)
        measured = any(one.measured is not None for result in results for one in result.variants)
        return cls(measured, "full" in arms and len(arms) > 1)

    @property
    def columns(self) -> list[str]:
        return ["Spearman with measured"] * self.measured + ["Spearman with full"] * self.full

    def cells(self, result: ProteinVariants, arm: Arm) -> list[str]:
        known = [result.against_measured(arm)] * self.measured + [result.against_full(arm)] * self.full
        return [_number(value) for value in known]


def _target_table(result: TargetResult, top: int) -> Table:
    shown = result.ranking()[:top]
    reference = result.scores[result.reference]
    specificity, again = _SpecificityColumn.of(reference), _rescored_cells(result)
    rows = []
    for rank, index in enumerate(shown, start=1):
        candidate = result.candidates[index]
        perplexities = (scores.scores[index].pseudo_perplexity for scores in result.scores.values())
        likelihood = reference.scores[index].pseudo_log_likelihood
        cells = [str(rank), candidate.id, _shortened(candidate.sequence), *(f"{x:.3f}" for x in perplexities)]
        # The width of a terminal does not hold both.
        shown_figure = specificity.cells(index) or [f"{likelihood:.2f}"]
        rows.append([*cells, *shown_figure, *again.get(index, [])])
    rest = len(result.candidates) - len(shown)
    return text_table(
        f"{result.target.id}, {len(result.target.sequence):,} residues",
        [
            "rank",
            "candidate",
            "sequence",
            *(f"pseudo-perplexity, {arm}" for arm in result.scores),
            *(specificity.names or ["pseudo-log-lik." + (f", {result.reference}" if len(result.scores) > 1 else "")]),
            *(["by full", "rank"] if again else []),
        ],
        rows,
        left=(0, 1, 2),
        caption=f"and {rest:,} more" if rest else None,
    )


@dataclass(frozen=True)
class _SpecificityColumn:
    """The specificity of candidates, in standard deviations of the background if all have it in them."""

    values: tuple[float | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, scores: Scores) -> _SpecificityColumn:
        if scores.background is None:
            return cls((), ())
        in_spreads = all(one.specificity_z is not None for one in scores.scores if one.background is not None)
        values = tuple(one.specificity_z if in_spreads else one.specificity for one in scores.scores)
        return cls(values, (f"specificity, {'s.d.' if in_spreads else 'nats'}",))

    def cells(self, index: int) -> list[str]:
        return [_number(self.values[index])] if self.names else []


def _rescored_cells(result: TargetResult) -> dict[int, list[str]]:
    """Exact perplexity of every candidate that was scored again, its rank among these, and how far it moved."""
    if not result.rescored:
        return {}
    before, ranks = result.ranking(), result.rescored_ranks()
    cells = {}
    for index, one in result.rescored.items():
        moved = before.index(index) + 1 - ranks[index]
        cells[index] = [f"{one.pseudo_perplexity:.3f}", f"{ranks[index]}" + (f" ({moved:+d})" if moved else "")]
    return {index: cells.get(index, ["", ""]) for index in range(len(result.candidates))}


def _targets_summary(results: Sequence[TargetResult]) -> Table:
    """One row per target, with its best candidate."""
    rows = []
    for result in results[:_ROWS]:
        best = result.ranking()[0]
        perplexities = [f"{scores.scores[best].pseudo_perplexity:.3f}" for scores in result.scores.values()]
        counts = [f"{len(result.target.sequence):,}", f"{len(result.candidates):,}"]
        candidate = result.candidates[best]
        specific = _SpecificityColumn.of(result.scores[result.reference]).cells(best)
        rows.append([result.target.id, *counts, candidate.id, _shortened(candidate.sequence), *perplexities, *specific])
    return text_table(
        f"best candidates of {len(results):,} targets",
        [
            *("target", "residues", "candidates", "best candidate", "sequence"),
            *(f"pseudo-perplexity, {arm}" for arm in results[0].scores),
            *_SpecificityColumn.of(results[0].scores[results[0].reference]).names,
        ],
        rows,
        left=(0, 3, 4),
        caption=_rest(len(results)),
    )


def _rest(count: int) -> str | None:
    """The caption of a table that shows the first of many proteins."""
    return f"and {count - _ROWS:,} more, see --out; --top shows each by itself" if count > _ROWS else None


def _agreement_table(results: Sequence[TargetResult], each: bool) -> Table:
    """Agreements of the arms with the reference on each target, and their means."""
    rows = [
        [result.target.id, arm, *_agreement_cells([one])]
        for result in results
        for arm, one in result.agreement.items()
        if each
    ]
    agreements: dict[Arm, list[RankAgreement]] = {}
    for result in results:
        for arm, one in result.agreement.items():
            agreements.setdefault(arm, []).append(one)
    if len(results) > 1:
        rows += [["mean", arm, *_agreement_cells(own)] for arm, own in agreements.items()]
    first = next(result for result in results if result.agreement)
    top_k = max(one.top_k for own in agreements.values() for one in own)
    return text_table(
        f"agreement with {first.reference}",
        ["target", "arm", "Spearman", f"top {top_k} shared", "mean difference"],
        rows,
        caption="mean difference of pseudo-log-likelihoods, nats per residue",
    )


def _agreement_cells(agreements: Sequence[RankAgreement]) -> list[str]:
    """Means over targets."""
    known = [one.spearman for one in agreements if one.spearman is not None]
    return [
        _number(fmean(known) if known else None),
        f"{fmean(one.top_k_overlap for one in agreements):.2f}",
        _number(fmean(one.mean_difference for one in agreements)),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _shortened(sequence: str, longest: int = 32) -> str:
    return sequence if len(sequence) <= longest else sequence[: longest - 3] + "..."
