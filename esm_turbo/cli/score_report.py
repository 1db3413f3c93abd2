"""What `esm-turbo score` and `esm-turbo variants` print for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from esm_turbo.cli.console import table

if TYPE_CHECKING:
    from rich.table import Table

    from esm_turbo.tasks.common.options import Arm
    from esm_turbo.tasks.common.rankings import RankAgreement
    from esm_turbo.tasks.scoring.records import ScoringRun, TargetResult
    from esm_turbo.tasks.variants.records import VariantsRun


def score_report(run: ScoringRun, top: int) -> list[object]:
    """The best candidates of every target, and how well the arms agree."""
    parts: list[object] = [_target_table(result, top) for result in run.results]
    if any(result.agreement for result in run.results):
        parts.append(_agreement_table(run.results))
    return parts


def variants_report(run: VariantsRun, top: int) -> list[object]:
    """Correlations of every arm, and the variants that the model likes best."""
    arms = list(run.scores)
    rows = [
        [arm, run.scores[arm].preset or "-", _figure(run.against_measured(arm)), _figure(run.against_full(arm))]
        for arm in arms
    ]
    figures = table(
        f"{len(run.variants):,} variants, {run.scores[arms[0]].method.replace('_', '-')} marginals",
        ["arm", "stored as", "Spearman with measured", "with full"],
        rows,
    )
    order = sorted(range(len(run.variants)), key=run.scores[arms[0]].values.__getitem__, reverse=True)[:top]
    best = table(
        f"the {len(order)} likeliest by {arms[0]}",
        ["variant", "measured", *arms],
        [
            [
                run.variants[i].variant,
                _figure(run.variants[i].measured),
                *(_figure(run.scores[arm].values[i]) for arm in arms),
            ]
            for i in order
        ],
        caption="log-probability of the mutant less that of the wild type, nats",
    )
    return [figures, best] if order else [figures]


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
    made = table(
        f"{result.target.id}, {len(result.target.sequence):,} residues",
        [
            "rank",
            "candidate",
            "sequence",
            *(f"pseudo-perplexity, {arm}" for arm in result.scores),
            "pseudo-log-lik." + (f", {result.reference}" if len(result.scores) > 1 else ""),
        ],
        rows,
        caption=f"and {rest:,} more" if rest else None,
    )
    for column in made.columns[1:3]:
        column.justify = "left"
    return made


def _agreement_table(results: Sequence[TargetResult]) -> Table:
    rows = [
        [result.target.id, arm, *_agreement_cells(one)] for result in results for arm, one in result.agreement.items()
    ]
    means = _means([result.agreement for result in results])
    rows += [["mean", arm, *cells] for arm, cells in means.items()] if len(results) > 1 else []
    first = next(result for result in results if result.agreement)
    top_k = max(one.top_k for result in results for one in result.agreement.values())
    return table(
        f"agreement with {first.reference}",
        ["target", "arm", "Spearman", f"best {top_k} shared", "mean difference"],
        rows,
        caption="mean difference of pseudo-log-likelihoods, nats a residue",
    )


def _agreement_cells(one: RankAgreement) -> list[str]:
    return [_figure(one.spearman), f"{one.top_k_overlap:.2f}", f"{one.mean_difference:.4f}"]


def _means(agreements: Sequence[Mapping[Arm, RankAgreement]]) -> dict[Arm, list[str]]:
    """Over targets, by arm."""
    means: dict[Arm, list[str]] = {}
    for arm in dict.fromkeys(arm for agreement in agreements for arm in agreement):
        own = [agreement[arm] for agreement in agreements if arm in agreement]
        known = [one.spearman for one in own if one.spearman is not None]
        means[arm] = [
            _figure(sum(known) / len(known) if known else None),
            f"{sum(one.top_k_overlap for one in own) / len(own):.2f}",
            f"{sum(one.mean_difference for one in own) / len(own):.4f}",
        ]
    return means


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _shortened(sequence: str, longest: int = 32) -> str:
    return sequence if len(sequence) <= longest else sequence[: longest - 3] + "..."
