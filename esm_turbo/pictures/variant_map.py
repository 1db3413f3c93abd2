"""The map of a deep mutational scan: an effect for every position and residue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import entr, softmax

from esm_turbo.files.tabular import counted
from esm_turbo.pictures.palettes import RESIDUE_ORDER
from esm_turbo.pictures.panels import (
    ENTROPY,
    Array,
    Bars,
    Heatmap,
    Histogram,
    Lines,
    Panel,
    Scatter,
    Sheet,
    Table,
    Tracks,
)
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.variants.records import MeasuredVariant, ProteinVariants
from esm_turbo.tasks.variants.score import VariantScores
from esm_turbo.tasks.variants.substitutions import Substitution, has_indel, parse_variants, split_variant

# Variants of which each has a bar.
_FEW = 20


def variant_sheet(result: ProteinVariants, used: str) -> Sheet:
    """The map of one protein's variants.

    Args:
        result: the scores; the first arm is shown, and its difference from `full` where that is another.
        used: what they were computed with.
    """
    wild_type, arm = result.wild_type, result.reference
    scores = {name: effects(result, name) for name in result.scores}
    singles = int(np.isfinite(scores[arm]).sum())
    substitutions = _single_substitutions(result)
    without_row = sum(one.mutant not in STANDARD_RESIDUES for _, one in substitutions)
    several = len(result.variants) - len(substitutions)
    indels = any(has_indel(one.variant) for one in result.variants)
    layout: list[Tracks | Sequence[Panel]] = []
    if singles:
        layout.append(_map(result, scores))
    layout += [_measured(result)] if len(_pairs(result)[0]) else []
    if not layout:
        layout.append([_distribution(result.scores[arm])])
    scored = result.scores[arm]
    how = f"{used}; {scored.method_name}"
    how += f", {scored.refresh} residues refreshed" if scored.refresh else ""
    reading = "log p(mutant) - log p(wild type)"
    reading += ", mean over the residues" if scored.method == "pseudo_perplexity" else ""
    reading += ": red is less likely than the wild type (dots), blue more likely" if singles else ""
    parts = [f"{how}.", f"{counted(len(result.variants), 'variant')}; {reading}."]
    if singles:
        shown = shown_positions(scores[arm])
        whole = np.isfinite(scores[arm][:, shown]).all(axis=0)
        if len(shown) < len(wild_type.sequence):
            parts.append(f"Only positions with scores are shown, {len(shown):,} of {len(wild_type.sequence):,}.")
            parts.append("Gaps stand for positions left out." if (np.diff(shown) > 1).any() else "")
        parts.append("Grey was not scored." if not whole.all() else "")
        parts.append("Entropy is over the 20 residues." if whole.any() and _has_entropy(result) else "")
    missing = ": not in the map" if singles else ""
    if without_row:
        parts.append(f"{counted(without_row, 'variant')} by other residues than the 20{missing}.")
    if several:
        changes = f"several substitutions{', insertions or deletions' if indels else ''}"
        parts.append(f"{counted(several, 'variant')} of {changes}{missing}.")
    kind = "variants" if indels else "substitutions"
    title = f"{wild_type.id}: effects of {kind}, {counted(len(wild_type.sequence), 'residue')}"
    measured = any(variant.measured is not None for variant in result.variants)
    columns = [*result.columns(), *(["measured"] if measured else [])]
    rows = [
        [*row, *([variant.measured] if measured else [])]
        for row, variant in zip(result.rows(), result.variants, strict=True)
    ]
    return Sheet(title, " ".join(filter(None, parts)), layout, Table(columns, rows, "position"))


def effects(result: ProteinVariants, arm: Arm) -> Array:
    """Scores of single substitutions, [20, positions] in `RESIDUE_ORDER`; NaN where there is none, 0 at the wild type.

    A variant that occurs several times counts once.
    """
    sequence = result.wild_type.sequence
    values = np.full((len(RESIDUE_ORDER), len(sequence)), np.nan)
    for number, one in _single_substitutions(result):
        if one.mutant in STANDARD_RESIDUES:
            values[RESIDUE_ORDER.index(one.mutant), one.index] = result.scores[arm].scores[number].score
    scored = np.isfinite(values).any(axis=0)
    for index, letter in enumerate(sequence):
        if scored[index] and letter in RESIDUE_ORDER:
            values[RESIDUE_ORDER.index(letter), index] = 0.0
    return values


def _single_substitutions(result: ProteinVariants) -> list[tuple[int, Substitution]]:
    """Variants of one substitution, each with its number among all."""
    names = {number: one.variant for number, one in enumerate(result.variants) if _is_single(one)}
    parsed = parse_variants(list(names.values()), result.wild_type.sequence, result.first_position)
    return [(number, one) for number, [one] in zip(names, parsed, strict=True)]


def _is_single(variant: MeasuredVariant) -> bool:
    return len(split_variant(variant.variant)) == 1 and not has_indel(variant.variant)


def _has_entropy(result: ProteinVariants) -> bool:
    """Whether scores are log-probabilities at a position but for a constant."""
    return result.scores[result.reference].method != "pseudo_perplexity"


def shown_positions(values: Array) -> npt.NDArray[np.int64]:
    """Indices of the positions that a map shows: all, or, where most have no score, those that have one.

    Args:
        values: scores, [20, positions].
    """
    scored = np.flatnonzero(np.isfinite(values).any(axis=0))
    return scored if 2 * len(scored) < values.shape[1] else np.arange(values.shape[1])


def mean_effects(values: Array, sequence: str) -> Array:
    """Mean score of the mutants at each position, [positions]; NaN where none is scored."""
    mutants = values.copy()
    for index, letter in enumerate(sequence):
        if letter in RESIDUE_ORDER:
            mutants[RESIDUE_ORDER.index(letter), index] = np.nan
    known = np.isfinite(mutants).sum(axis=0)
    return np.where(known > 0, np.nansum(mutants, axis=0) / np.maximum(known, 1), np.nan)


def entropies(values: Array) -> Array:
    """Entropy of the predicted residue at each position, bits, [positions]; NaN where not all 20 are known.

    Scores are log-probabilities but for a constant, so that their softmax is the distribution over the 20 residues.
    """
    bits = entr(softmax(np.nan_to_num(values), axis=0)).sum(axis=0) / np.log(2)
    return np.where(np.isfinite(values).all(axis=0), bits, np.nan)


def _unit(scores: VariantScores) -> str:
    """Of the scores, which are means over residues if whole variants are scored."""
    return "nats per residue" if scores.method == "pseudo_perplexity" else "nats"


def _map(result: ProteinVariants, scores: dict[Arm, Array]) -> Tracks:
    unit = _unit(result.scores[result.reference])
    shown = shown_positions(scores[result.reference])
    sequence = "".join(result.wild_type.sequence[index] for index in shown)
    positions = [result.first_position + int(index) for index in shown]
    scores = {arm: values[:, shown] for arm, values in scores.items()}
    values = scores[result.reference]
    dots = [
        (RESIDUE_ORDER.index(letter), index)
        for index, letter in enumerate(sequence)
        if letter in RESIDUE_ORDER and np.isfinite(values[:, index]).any()
    ]
    names = [
        [f"{letter}{position}{mutant}" for letter, position in zip(sequence, positions, strict=True)]
        for mutant in RESIDUE_ORDER
    ]
    tracks: list[Heatmap | Lines] = [
        Lines(
            positions,
            {"mean effect": mean_effects(values, sequence)},
            "position",
            f"mean effect\n({unit})",
            filled=True,
        )
    ]
    if _has_entropy(result) and np.isfinite(entropies(values)).any():
        tracks.append(Lines(positions, {"entropy": entropies(values)}, "position", "entropy\n(bits)", limits=ENTROPY))
    tracks.append(
        Heatmap(
            values,
            list(RESIDUE_ORDER),
            positions,
            f"score ({unit})",
            "position",
            "mutant residue",
            True,
            names=names,
            dots=dots,
        )
    )
    others = [name for name in scores if name != "full"] if "full" in scores else []
    if others:
        differences = {
            f"{name} - full": mean_effects(np.abs(scores[name] - scores["full"]), sequence) for name in others
        }
        largest = float(np.nanmax([*differences.values(), np.full(len(positions), 1e-6)]))
        label = f"|arm - full|\n(mean, {unit})"
        tracks.append(Lines(positions, differences, "position", label, limits=(0.0, largest)))
    return Tracks(tracks, positions, list(sequence))


def _distribution(scores: VariantScores) -> Panel:
    """Variants that no map shows: each of a few, best first, or how many have which score."""
    values, label = np.array(scores.values), f"score ({_unit(scores)})"
    if len(values) > _FEW:
        return Histogram(values, label, noun="variants")
    best = scores.ranking()
    return Bars([scores.scores[index].variant for index in best], values[best], label)


def _pairs(result: ProteinVariants) -> tuple[list[int], Array]:
    """Indices of the variants that were measured, and the measurements."""
    at = [index for index, variant in enumerate(result.variants) if variant.measured is not None]
    return at, np.array([result.variants[index].measured for index in at], dtype=np.float64)


def _measured(result: ProteinVariants) -> list[Panel]:
    at, measured = _pairs(result)
    names = [result.variants[index].variant for index in at]
    panels: list[Panel] = []
    for arm, scores in result.scores.items():
        found = result.against_measured(arm)
        title = f"{arm}, {len(at):,} measured" + ("" if found is None else f", Spearman {found:.3f}")
        values = np.array(scores.values)[at]
        panels.append(Scatter(measured, values, names, "measured fitness", f"score ({_unit(scores)})", title))
    return panels
