"""Reports of `esm-turbo score`, `binders` and `variants`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

from esm_turbo.files.tabular import counted
from esm_turbo.files.text_tables import text_table

if TYPE_CHECKING:
    from rich.table import Table

    from esm_turbo.binders import Binders
    from esm_turbo.tasks.common.options import Arm, SortBy
    from esm_turbo.tasks.common.rankings import RankAgreement
    from esm_turbo.tasks.scoring.records import ScoringRun, TargetResult
    from esm_turbo.tasks.scoring.score import Scores
    from esm_turbo.tasks.variants.records import ProteinVariants, VariantsRun

    Correlation = Callable[[ProteinVariants, Arm], float | None]

# Proteins, or targets, up to which each is shown by itself, and how many of its best.
_FEW, _TOP = 3, 10
# By whether whole variants are scored.
_UNITS = {
    False: "log-probability of the mutant minus that of the wild type, nats",
    True: "mean log-probability of the variant's residues minus that of the wild type's, nats per residue",
}
_APPROXIMATE = "compare ranks: single values are approximate"
_HOW_EXACTLY = f"{_APPROXIMATE}; --rescore, or --arm full, computes them exactly"
_BUT_THE_BEST = f"{_APPROXIMATE}, except those by full"
# By the unit in which specificity ranks.
_SPECIFICITIES = {
    "s.d.": "specificity, in standard deviations of",
    "nats": "specificity, nats per residue against",
}
# Headers of tables that fit into 120 columns have several lines.
_PERPLEXITY = "pseudo-\nperplexity"
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
        if any(one.rescored for one in run.results):
            parts.append("--top 10 shows ten candidates of each target, also those that were scored again")
    if any(result.agreement for result in run.results):
        parts.append(_agreement_table(run.results, few))
    if not parts or not run.results or "full" in run.results[0].scores:
        return parts
    return [*parts, _how_exact([one.scores[one.reference] for one in run.results])]


def binders_report(found: Mapping[str, Binders], top: int) -> list[object]:
    """The best peptides of every target, by its name."""
    parts: list[object] = [_binders_table(target, one, top) for target, one in found.items() if top]
    if not parts or any(one.arm == "full" for one in found.values()):
        return parts
    return [*parts, _how_exact([one.scores for one in found.values()])]


def _how_exact(scores: Sequence[Scores]) -> str:
    """Which of the values shown are approximate."""
    return _BUT_THE_BEST if any(one.rescored for one in scores) else _HOW_EXACTLY


def _binders_table(target: str, found: Binders, top: int) -> Table:
    shown = found.binders[:top]
    unit, values = found.scores.specificities()
    titles, again = _rescored(found.scores)
    columns = ["rank", "binder", _PERPLEXITY, *([f"specificity\n{unit}"] if unit else []), "seed", *titles]
    rows = []
    for index, one in enumerate(shown):
        figures = [f"{one.score.pseudo_perplexity:.3f}", *([_number(values[index])] if unit else [])]
        rows.append([str(index + 1), one.sequence, *figures, str(one.seed), *again[index]])
    return text_table(
        target,
        columns,
        rows,
        left=(0, 1),
        spare=_spare(columns, found.sort_by),
        caption=_caption(len(found.binders) - len(shown), found.scores),
    )


def _caption(rest: int, *every: Scores) -> str | None:
    """How many candidates a table leaves out, and with a background what that is, and what ranks them."""
    from esm_turbo.tasks.scoring.score import compared_with

    background, units = every[0].background, {scores.specificities()[0] for scores in every}
    by = "pseudo-perplexity; specificity against"
    if every[0].sort_by == "specificity":
        # Within 80 columns. Targets whose candidates have few contexts are ranked in nats.
        own = _SPECIFICITIES[units.pop() or "nats"] if len(units) == 1 else ""
        by = own or "specificity, of each target in its unit, against"
    text = compared_with(background, [one for scores in every for one in scores.scores])
    compared = [] if background is None else [f"ranked by {by} {text}"]
    return "; ".join([f"and {rest:,} more"] * bool(rest) + compared) or None


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
    # Those of exact contexts, and of a whole wild type, do not.
    return parts if exact or not parts else [*parts, "compare ranks: single values may differ from those of --arm full"]


def _variants_of(result: ProteinVariants, top: int) -> Iterator[object]:
    arms = list(result.scores)
    method = result.scores[result.reference].method_name
    yield f"{result.wild_type.id}: {counted(len(result.variants), 'variant')}, {method}"
    if known := _correlations([result]):
        rows = [[arm, result.scores[arm].preset or "-", *_correlation_cells(known, result, arm)] for arm in arms]
        yield text_table("", ["arm", "stored as", *known], rows)
    order = result.ranking()[:top]
    if order:
        measured = any(result.variants[i].measured is not None for i in order)
        columns = ["variant", *(["measured"] * measured), *arms]
        rows = []
        for i in order:
            own = [result.variants[i].measured] * measured + [result.scores[arm].values[i] for arm in arms]
            rows.append([result.variants[i].variant, *map(_number, own)])
        yield text_table(f"top {len(order)} by {result.reference}", columns, rows, caption=_unit(result))


def _unit(result: ProteinVariants) -> str:
    return _UNITS[result.scores[result.reference].method == "pseudo_perplexity"]


def _variants_summary(results: Sequence[ProteinVariants]) -> Table:
    """One row per protein and arm."""
    known = _correlations(results)
    rows = []
    for result in results[:_ROWS]:
        for arm, scores in result.scores.items():
            best = scores.scores[scores.ranking()[0]]
            cells = [arm, _number(fmean(scores.values)), best.variant, _number(best.score)]
            count = f"{len(result.variants):,}"
            rows.append([result.wild_type.id, count, *cells, *_correlation_cells(known, result, arm)])
    columns = ["protein", "variants", "arm", "mean\nscore", "best\nvariant", "its\nscore", *known]
    title = f"{len(results):,} proteins, {results[0].scores[results[0].reference].method_name}"
    return text_table(
        title, columns, rows, left=(0, 2, 4), caption=_rest(len(results)) or f"score: {_unit(results[0])}"
    )


def _correlations(results: Sequence[ProteinVariants]) -> dict[str, Correlation]:
    """Rank correlations that are defined for any of the results, by their names."""
    arms = list(results[0].scores)
    measured = any(one.measured is not None for result in results for one in result.variants)
    known: dict[str, Correlation] = {}
    if measured:
        known["Spearman\nwith measured"] = lambda result, arm: result.against_measured(arm)
    if "full" in arms and len(arms) > 1:
        known["Spearman\nwith full"] = lambda result, arm: result.against_full(arm)
    return known


def _correlation_cells(known: dict[str, Correlation], result: ProteinVariants, arm: Arm) -> list[str]:
    return [_number(correlation(result, arm)) for correlation in known.values()]


def _target_table(result: TargetResult, top: int) -> Table:
    shown = result.ranking()[:top]
    reference = result.scores[result.reference]
    unit, specificities = reference.specificities()
    titles, again = _rescored(reference)
    rows = []
    for rank, index in enumerate(shown, start=1):
        candidate = result.candidates[index]
        cells = [str(rank), candidate.id, _shortened(candidate.sequence), *_perplexities(result, index)]
        # The width of a terminal does not hold both.
        likelihood = f"{reference.scores[index].pseudo_log_likelihood:.2f}"
        rows.append([*cells, _number(specificities[index]) if unit else likelihood, *again[index]])
    rest = len(result.candidates) - len(shown)
    of_arm = f"\n{result.reference}" if len(result.scores) > 1 else ""
    columns = [
        *("rank", "candidate", "sequence"),
        *(f"{_PERPLEXITY}\n{arm}" for arm in result.scores),
        f"specificity\n{unit}" if unit else f"pseudo-log-lik.{of_arm}",
        *titles,
    ]
    return text_table(
        f"{result.target.id}, {len(result.target.sequence):,} residues",
        columns,
        rows,
        left=(0, 1, 2),
        cut=(2,),
        spare=_spare(columns, result.sort_by),
        caption=_caption(rest, reference),
    )


def _spare(columns: Sequence[str], sort_by: SortBy) -> list[int]:
    """Indices of the columns that a narrow terminal can do without: numbers that do not rank."""
    others = ("pseudo-",) if sort_by == "specificity" else ("pseudo-log", "specificity")
    spare = ("residues", "candidates", "seed", *others)
    return [index for index, column in enumerate(columns) if column.startswith(spare)]


def _perplexities(result: TargetResult, index: int) -> list[str]:
    """Of a candidate in every arm."""
    return [f"{scores.scores[index].pseudo_perplexity:.3f}" for scores in result.scores.values()]


def _rescored(scores: Scores, unit: str = "") -> tuple[list[str], list[list[str]]]:
    """Columns of candidates that were scored again, and the cells of each candidate; none if no candidate was.

    They are its exact figures, of specificity in `unit` or else that of the scores, its rank among these candidates,
    and how far it moved.
    """
    if not scores.rescored:
        return [], [[]] * len(scores.scores)
    unit = (unit or scores.specificities()[0] or "") if scores.sort_by == "specificity" else ""
    titles = [f"{_PERPLEXITY}\nfull", *([f"specificity\nfull, {unit}"] if unit else []), "rank\nby full"]
    cells = [[""] * len(titles)] * len(scores.scores)
    exact = scores.rescored_cells()
    for before, index in enumerate(scores.ranking(), start=1):
        one = dict(zip(scores.rescored_columns(), exact[index], strict=True))
        rank = one["full_rank"]
        if rank is not None:
            compared = [_number(one["full_specificity_z" if unit == "s.d." else "full_specificity"])] if unit else []
            moved = f" ({before - rank:+d})" if before != rank else ""
            cells[index] = [f"{one['full_pseudo_perplexity']:.3f}", *compared, f"{rank}{moved}"]
    return titles, cells


def _targets_summary(results: Sequence[TargetResult]) -> Table:
    """One row per target, with its best candidate; sizes are left out beside exact values, which need the width."""
    from esm_turbo.tasks.scoring.score import specificities

    rows = []
    every = [result.scores[result.reference] for result in results]
    # All are shown in one unit.
    unit, values = specificities([one for own in every for one in own.scores])
    unit = unit if every[0].background is not None else ""
    begins = [0, *accumulate(len(own.scores) for own in every)]
    exact = [_rescored(own, unit) for own in every[:_ROWS]]
    titles = next((own for own, _ in exact if own), [])
    sizes = [] if titles else ["residues", "candidates"]
    for result, begin, (_, again) in zip(results, begins, exact, strict=False):
        # By the arm full, if that has ranked some again.
        ranks = result.scores[result.reference].rescored_cells()
        best = next((index for index, own in enumerate(ranks) if own and own[-1] == 1), result.ranking()[0])
        counts = [f"{len(result.target.sequence):,}", f"{len(result.candidates):,}"]
        candidate = result.candidates[best]
        cells = [candidate.id, _shortened(candidate.sequence), *_perplexities(result, best)]
        compared = [_number(values[begin + best])] if unit else []
        rows.append([result.target.id, *counts[: len(sizes)], *cells, *compared, *(again[best] or [""] * len(titles))])
    columns = [
        *("target", *sizes, "best\ncandidate", "sequence"),
        *(f"{_PERPLEXITY}\n{arm}" for arm in results[0].scores),
        *([f"specificity\n{unit}"] if unit else []),
        *titles,
    ]
    return text_table(
        f"best candidates of {len(results):,} targets",
        columns,
        rows,
        left=(0, len(sizes) + 1, len(sizes) + 2),
        cut=(len(sizes) + 2,),
        spare=_spare(columns, results[0].sort_by),
        caption=_rest(len(results)) or _caption(0, *every),
    )


def _rest(count: int) -> str | None:
    """The caption of a table that shows the first of many proteins."""
    return f"and {count - _ROWS:,} more, see --out; --top shows each by itself" if count > _ROWS else None


def _agreement_table(results: Sequence[TargetResult], each: bool) -> Table:
    """Agreements of the arms with the reference on each target, and their means."""
    agreements: dict[Arm, list[RankAgreement]] = {}
    rows = []
    for result in results:
        for arm, one in result.agreement.items():
            agreements.setdefault(arm, []).append(one)
            rows += [[result.target.id, arm, *_agreement_cells([one])]] if each else []
    if len(results) > 1:
        rows += [["mean", arm, *_agreement_cells(own)] for arm, own in agreements.items()]
    top_k = max(one.top_k for own in agreements.values() for one in own)
    return text_table(
        f"agreement with {results[0].reference}",
        ["target", "arm", "Spearman", f"top {top_k} shared", "mean difference"],
        rows,
        caption="of pseudo-log-likelihoods, nats per residue, whatever ranks",
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
    return sequence if len(sequence) <= longest else sequence[: longest - 1] + "…"
