"""The typed figures of an evaluation, summarised from errors per token."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from esm_turbo.evaluate.metrics import Accuracy
from esm_turbo.evaluate.protocols import Arms, Comparison
from esm_turbo.proteins.limits import length_bin, range_of

_POSITION_BOUNDS = (300, 600)


@dataclass(frozen=True)
class TokenAccuracy:
    """One comparison, with residues and special tokens separate.

    Attributes:
        residues: of the residues.
        special_tokens: of `<cls>` and `<eos>`.
    """

    residues: Accuracy
    special_tokens: Accuracy

    @classmethod
    def of(cls, comparison: Comparison) -> Self:
        """Figures of a comparison that has tokens."""
        return cls(comparison.residues.accuracy(), comparison.special_tokens.accuracy())


@dataclass(frozen=True)
class LayerAccuracy:
    """Errors of one layer's hidden states, over residues.

    Attributes:
        layer: counted from 1; the last one includes the final layer norm.
        cosine_mean: mean cosine.
        relative_rms_error: as in `Accuracy`.
    """

    layer: int
    cosine_mean: float
    relative_rms_error: float


@dataclass(frozen=True)
class LeaveOneOut:
    """Figure 1 of one preset: every position in turn is the new token.

    Attributes:
        against_frozen: the quantisation error.
        against_full: the total error.
        by_class: against frozen, residues by structural class; empty if no class is known.
        by_length: against frozen, residues by length of the protein.
        by_position: against frozen, residues by their position.
        by_layer: against frozen, residues by layer.
    """

    against_frozen: TokenAccuracy
    against_full: TokenAccuracy
    by_class: Mapping[str, Accuracy]
    by_length: Mapping[str, Accuracy]
    by_position: Mapping[str, Accuracy]
    by_layer: tuple[LayerAccuracy, ...]

    @classmethod
    def of(cls, against_frozen: Comparison, against_full: Comparison) -> Self:
        """Figures of one preset."""
        proteins = against_frozen.proteins
        return cls(
            TokenAccuracy.of(against_frozen),
            TokenAccuracy.of(against_full),
            _by([protein.structural_class for protein in proteins], against_frozen),
            _by([length_bin(len(protein)) for protein in proteins], against_frozen),
            _by([range_of(position, _POSITION_BOUNDS) for position in against_frozen.positions], against_frozen),
            tuple(
                LayerAccuracy(layer, cosine, error)
                for layer, (cosine, error) in enumerate(against_frozen.layers.figures(), start=1)
            ),
        )


@dataclass(frozen=True)
class Extend:
    """Figure 2 for one k and w, of one preset or of contexts at full precision.

    Attributes:
        new_residues: k, the number of last residues, which extend a context of the others.
        refreshed: w, the number of context residues recomputed with them.
        proteins: number of proteins that were long enough.
        skipped: number of proteins that were too short.
        against_frozen: the quantisation error; None at full precision, and if no protein was long enough.
        against_full: the total error, at full precision the freezing error; None if no protein was long enough.
    """

    new_residues: int
    refreshed: int
    proteins: int
    skipped: int
    against_frozen: TokenAccuracy | None
    against_full: TokenAccuracy | None


@dataclass(frozen=True)
class Memory:
    """Figure 3: memory of a cache of one protein.

    Attributes:
        tokens: of the protein, `<cls>` and `<eos>` included.
        nbytes: everything that is stored for them.
        bits_per_element: 8 nbytes divided by the number of key and value components.
        ratio_to_fp32: compression ratio to keys and values in float32.
        ratio_to_fp16: compression ratio to float16.
        calibration_nbytes: parameters of the codec, shared by all caches and not counted above.
    """

    tokens: int
    nbytes: int
    bits_per_element: float
    ratio_to_fp32: float
    ratio_to_fp16: float
    calibration_nbytes: int


@dataclass(frozen=True)
class PresetEvaluation:
    """All figures of one preset.

    Attributes:
        name: of the preset.
        options: its `TurboConfig`.
        memory: figure 3.
        leave_one_out: figure 1.
        extend: figure 2, for every k and w.
    """

    name: str
    options: Mapping[str, Any]
    memory: Memory
    leave_one_out: LeaveOneOut
    extend: tuple[Extend, ...]


@dataclass(frozen=True)
class Frozen:
    """The frozen arm: contexts at full precision.

    Attributes:
        leave_one_out: frozen against full, equal up to rounding.
        extend: frozen against full for every k and w.
    """

    leave_one_out: TokenAccuracy
    extend: tuple[Extend, ...]


@dataclass(frozen=True)
class Provenance:
    """Model, environment and data of an evaluation.

    Attributes:
        model: hub id or name of the folder.
        geometry: layers, heads and components per head.
        dtype: of the model.
        device: of the model.
        device_name: name of the accelerator or the processor.
        backend: implementation of the packed attention.
        versions: of Python and packages.
        calibration: provenance of the calibration; None without one.
        proteins: number of proteins evaluated.
        residues: their total number of residues.
        sequences_sha256: of the sequences, each after its homologs, one per line.
    """

    model: str
    geometry: Mapping[str, int]
    dtype: str
    device: str
    device_name: str
    backend: str
    versions: Mapping[str, str]
    calibration: Mapping[str, Any] | None
    proteins: int
    residues: int
    sequences_sha256: str


def extensions(arms: Mapping[tuple[int, int], Arms], lengths: Sequence[int], preset: str | None) -> tuple[Extend, ...]:
    """Figure 2 for every k and w.

    Args:
        arms: by k and w.
        lengths: of the proteins.
        preset: its name; None for contexts at full precision.
    """
    found = []
    for (k, w), one in arms.items():
        skipped = sum(length <= k for length in lengths)
        against_frozen = None if preset is None else _optional(one.turbo_frozen[preset])
        against_full = _optional(one.frozen_full if preset is None else one.turbo_full[preset])
        found.append(Extend(k, w, len(lengths) - skipped, skipped, against_frozen, against_full))
    return tuple(found)


def _optional(comparison: Comparison) -> TokenAccuracy | None:
    return TokenAccuracy.of(comparison) if len(comparison) else None


def _by(labels: Sequence[str | None], comparison: Comparison) -> dict[str, Accuracy]:
    """Figures of the residues with each label, sorted by label; residues labelled None are left out."""
    errors, array = comparison.residues, np.array(labels, dtype=object)
    return {label: errors[array == label].accuracy() for label in sorted({x for x in labels if x}, key=_sort_key)}


def _sort_key(label: str) -> tuple[int, Hashable]:
    """Sort ranges by their first number, other labels by name."""
    number = re.search(r"\d+", label)
    return (int(number[0]) if number else 0, label)
