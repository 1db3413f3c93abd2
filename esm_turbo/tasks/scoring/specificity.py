"""Specificity of candidates: how much more likely each is on its target than on a background.

With x the log-likelihood per residue of a candidate on its target, and b_1 ... b_n those of the same candidate in the
contexts of a background,

    specificity = x - mean(b),    specificity_z = (x - mean(b)) / s(b),

s the sample standard deviation. The mean takes out how likely the candidate is after any protein, which is most of a
likelihood. Without a target as the background, the specificity is the pointwise mutual information of candidate and
target, per residue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, get_args

import numpy as np

from esm_turbo.assets import calibration_proteins
from esm_turbo.context_model import as_list
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta
from esm_turbo.tasks.common.checks import check_choice
from esm_turbo.tasks.common.options import Background

NO_TARGET = "<cls>"
"""In place of a target's residues: candidates follow nothing but this token."""

FEWEST_FOR_SPREAD = 5
"""Contexts of a background from which its standard deviation is used."""
# Nats per residue: smaller spreads are of rounding.
_NO_SPREAD = 1e-6
# Of the shipped proteins, four chains of each class of folded, soluble ones, by turns; see docs/scoring.md.
_DECOYS = (
    *("5bs1-A", "6kjk-A", "2i02-A"),
    *("2ip6-A", "5amh-A", "6qta-B"),
    *("4mi8-B", "4ofk-B", "3a2e-A"),
    *("3bdd-A", "2ov0-A", "3te8-B"),
)
_COST = 4
"""Pairs for each decoy of a candidate, so that `decoys` add at most a quarter to a screen."""


class BackgroundFigures(NamedTuple):
    """Log-likelihoods per residue of a candidate in a background.

    Attributes:
        mean: nats.
        spread: sample standard deviation, nats; 0 for one context.
        contexts: how many there are.
    """

    mean: float
    spread: float
    contexts: int

    @classmethod
    def of(cls, values: Sequence[float]) -> BackgroundFigures:
        """The figures of at least one value."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))

    def in_spreads(self, difference: float) -> float | None:
        """A difference from the mean in standard deviations; None of fewer than 5 contexts, or of equal ones."""
        if self.contexts < FEWEST_FOR_SPREAD or self.spread < _NO_SPREAD:
            return None
        return difference / self.spread


def background_contexts(background: Background | Sequence[str], targets: int) -> tuple[str | None, list[ProteinRecord]]:
    """The name of a background, None for `none`, and the proteins in whose context candidates are scored for it.

    Args:
        background: its name; or residues of decoys.
        targets: number of targets of a candidate. Of the shipped decoys, `decoys` are as many as cost a quarter of a
            screen, or all where that is not even one.

    Raises:
        ValueError: there is no such background, or no decoys.
    """
    if background is not None and not isinstance(background, str):
        decoys = as_list(background, "decoy")
        if names := [one for one in decoys if one in get_args(Background)]:
            raise ValueError(f"a list of decoys holds residues, not names: give background={names[0]!r}")
        return "decoys", [ProteinRecord(f"decoy_{number}", one) for number, one in enumerate(decoys, start=1)]
    match check_choice("background", background, get_args(Background)):
        case "alone":
            return background, [ProteinRecord("alone", NO_TARGET)]
        case "decoys" | "all-decoys":
            by_id = {record.id: record for record in read_fasta(calibration_proteins())[0]}
            number = targets // _COST if background == "decoys" else 0
            return "decoys", [by_id[name] for name in _DECOYS[: number or None]]
        case _:
            return None if background == "none" else background, []


def are_compared(pairs: Iterable[tuple[str, str]]) -> bool:
    """True if some candidate is scored on several different targets; pairs are a candidate and residues of a target."""
    first: dict[str, str] = {}
    return any(first.setdefault(candidate, target) != target for candidate, target in pairs)


def figures_in(contexts: Iterable[Mapping[str, float]]) -> dict[str, BackgroundFigures]:
    """Figures of candidates from their log-likelihoods per residue in each context of a background."""
    values: dict[str, list[float]] = {}
    for one in contexts:
        for candidate, value in one.items():
            if math.isfinite(value):
                values.setdefault(candidate, []).append(value)
    return {candidate: BackgroundFigures.of(own) for candidate, own in values.items()}


def figures_elsewhere(
    targets: Sequence[str], contexts: Iterable[tuple[str, Mapping[str, float]]]
) -> list[dict[str, BackgroundFigures]]:
    """For each target the figures of candidates in the contexts of a background, other than itself.

    Args:
        targets: residues of each.
        contexts: residues of each, and log-likelihoods per residue by candidate. Those of the same residues count as
            one.

    Raises:
        ValueError: all of them are the target itself.
    """
    distinct: dict[str, Mapping[str, float]] = {}
    for residues, values in contexts:
        distinct.setdefault(residues, values)
    if distinct.keys() == set(targets) and len(distinct) == 1:
        raise ValueError("the background holds no other protein than the target: give other decoys")
    shared = figures_in(distinct.values())
    return [
        figures_in(own for residues, own in distinct.items() if residues != target) if target in distinct else shared
        for target in targets
    ]


def figures_on_others(results: Sequence[tuple[str, Mapping[str, float]]]) -> list[dict[str, BackgroundFigures]]:
    """For each target the figures of its candidates on all other targets; those on no other have none.

    Args:
        results: residues of each target, and log-likelihoods per residue by candidate. Targets of the same residues
            count as one.
    """
    values: dict[str, dict[str, float]] = {}
    for target, by_candidate in results:
        for candidate, value in by_candidate.items():
            if math.isfinite(value):
                values.setdefault(candidate, {}).setdefault(target, value)
    figures: dict[str, dict[str, BackgroundFigures]] = {target: {} for target, _ in results}
    for candidate, own in values.items():
        for target, others in zip(own, leave_one_out(list(own.values())), strict=False):
            figures[target][candidate] = others
    return [figures[target] for target, _ in results]


def leave_one_out(values: Sequence[float]) -> list[BackgroundFigures]:
    """For each of at least two values the figures of all others; nothing for fewer."""
    count = len(values)
    if count < 2:
        return []
    centre = fmean(values)
    # Of centred values, so that sums of squares lose no digits.
    centred = np.asarray(values, dtype=np.float64) - centre
    means = (centred.sum() - centred) / (count - 1)
    squares = np.square(centred).sum() - np.square(centred) - (count - 1) * np.square(means)
    spreads = np.sqrt(np.maximum(squares, 0) / max(1, count - 2))
    pairs = zip(means.tolist(), spreads.tolist(), strict=True)
    return [BackgroundFigures(centre + mean, spread, count - 1) for mean, spread in pairs]
