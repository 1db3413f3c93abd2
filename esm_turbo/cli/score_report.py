"""What `esm-turbo score` and `esm-turbo variants` print."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from esm_turbo.files.text_tables import text_table

if TYPE_CHECKING:
    from rich.table import Table

    from esm_turbo.tasks.common.options import Arm
    from esm_turbo.tasks.common.rankings import RankAgreement
    from esm_turbo.tasks.scoring.records import ScoringRun, TargetResult
    from esm_turbo.tasks.variants.records import VariantsRun


def score_report(run: ScoringRun, top: int) -> list[object]:
    """The best candidates of every target, and the agreement of the arms."""
    parts: list[object] = [_target_table(result, top) for result in run.results]
    if any(result.agreement for result in run.results):
        parts.append(_agreement_table(run.results))
    return parts


def variants_report(run: VariantsRun, top: int) -> list[object]:
    """Correlations of every arm, and the top-scoring variants."""
    arms = list(run.scores)
    rows = [
        [arm, run.scores[arm].preset or "-", _number(run.against_measured(arm)), _number(run.against_full(arm))]
        for arm in arms
    ]
    correlations = text_table(
        f"{len(run.variants):,} variants, {run.scores[arms[0]].method.replace('_', '-')} marginals",
        ["arm", "stored as", "Spearman with measured", "with full"],
        rows,
    )
    order = sorted(range(len(run.variants)), key=run.scores[arms[0]].values.__getitem__, reverse=True)[:top]
    best = text_table(
        f"top {len(order)} by {arms[0]}",
        ["variant", "measured", *arms],
        [
            [
                run.variants[i].variant,
                _number(run.variants[i].measured),
                *(_number(run.scores[arm].values[i]) for arm in arms),
            ]
            for i in order
        ],
        caption="log-probability of the mutant minus that of the wild type, nats",
    )
    return [correlations, best] if order else [correlations]


def _target_table(result: TargetResult, top: int) -> Table:
    shown = result.ranking()[:top]
    reference = result.scores[result.reference]
    rows = []
    for rank, index in enumerate(shown, start=1):
        candidate = result.candidates[index]
        perplexities = (scores.scores[index].pseudo_perplexity for scores in result.scores.values())
        likelihood = reference.scores[index].pseudo_log_likelihood
        cells = [str(rank), candidate.id, _shortened(candidate.sequence), *(f"{x:.3f}" for x in perplexities)]
        rows.append([*cells, f"{likelihood:.2f}"])
    rest = len(result.candidates) - len(shown)
    return text_table(
        f"{result.target.id}, {len(result.target.sequence):,} residues",
        [
            "rank",
            "candidate",
            "sequence",
            *(f"pseudo-perplexity, {arm}" for arm in result.scores),
            "pseudo-log-lik." + (f", {result.reference}" if len(result.scores) > 1 else ""),
        ],
        rows,
        left=(0, 1, 2),
        caption=f"and {rest:,} more" if rest else None,
    )


def _agreement_table(results: Sequence[TargetResult]) -> Table:
    rows = [
        [result.target.id, arm, *_agreement_cells([one])] for result in results for arm, one in result.agreement.items()
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
