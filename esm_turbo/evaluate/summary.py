"""Figures of an evaluation, summarised from errors per token."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import numpy as np

from esm_turbo.config import TurboConfig
from esm_turbo.evaluate.metrics import Accuracy
from esm_turbo.evaluate.protocols import Arms, Comparison, ExtendArms, Protein
from esm_turbo.evaluate.results import (
    Extend,
    Frozen,
    FrozenExtend,
    LayerAccuracy,
    LeaveOneOut,
    Memory,
    PresetEvaluation,
    TokenAccuracy,
)
from esm_turbo.proteins.limits import length_bin, range_of

_POSITION_BOUNDS = (300, 600)


def frozen_figures(loo: Arms, extend: Sequence[ExtendArms]) -> Frozen:
    """Frozen against full."""
    return Frozen(
        token_accuracy(loo.frozen_full),
        tuple(FrozenExtend(e.new_residues, e.refreshed, _optional(e.arms.frozen_full)) for e in extend),
    )


def preset_figures(
    name: str,
    config: TurboConfig,
    memory: Memory,
    proteins: Sequence[Protein],
    loo: Arms,
    extend: Sequence[ExtendArms],
) -> PresetEvaluation:
    """All figures of one preset."""
    against_frozen = loo.turbo_frozen[name]
    classes = [protein.structural_class for protein in against_frozen.proteins]
    lengths = [length_bin(len(protein)) for protein in against_frozen.proteins]
    positions = [range_of(position, _POSITION_BOUNDS) for position in against_frozen.positions]
    return PresetEvaluation(
        name,
        config.to_dict(),
        memory,
        LeaveOneOut(
            token_accuracy(against_frozen),
            token_accuracy(loo.turbo_full[name]),
            _by(classes, against_frozen),
            _by(lengths, against_frozen),
            _by(positions, against_frozen),
            tuple(
                LayerAccuracy(layer, cosine, error)
                for layer, (cosine, error) in enumerate(against_frozen.layers.figures(), start=1)
            ),
        ),
        tuple(
            Extend(
                e.new_residues,
                e.refreshed,
                len(proteins) - e.skipped,
                e.skipped,
                _optional(e.arms.turbo_frozen[name]),
                _optional(e.arms.turbo_full[name]),
            )
            for e in extend
        ),
    )


def token_accuracy(comparison: Comparison) -> TokenAccuracy:
    """Figures of residues and of special tokens."""
    return TokenAccuracy(comparison.residues.accuracy(), comparison.special_tokens.accuracy())


def _optional(comparison: Comparison) -> TokenAccuracy | None:
    return token_accuracy(comparison) if len(comparison) else None


def _by(labels: Sequence[str | None], comparison: Comparison) -> dict[str, Accuracy]:
    """Figures of the residues with each label, sorted by label; residues labelled None are left out."""
    errors, array = comparison.residues, np.array(labels, dtype=object)
    return {label: errors[array == label].accuracy() for label in sorted({x for x in labels if x}, key=_sort_key)}


def _sort_key(label: str) -> tuple[int, Hashable]:
    """Sort ranges by their first number, other labels by name."""
    number = re.search(r"\d+", label)
    return (int(number[0]) if number else 0, label)
