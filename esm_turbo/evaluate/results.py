"""The typed result of an evaluation, and its plain JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from esm_turbo.evaluate.metrics import Accuracy


@dataclass(frozen=True)
class TokenAccuracy:
    """One comparison, residues and special tokens apart.

    Attributes:
        residues: of the residues.
        special_tokens: of `<cls>` and `<eos>`.
    """

    residues: Accuracy
    special_tokens: Accuracy


@dataclass(frozen=True)
class LayerAccuracy:
    """One layer's hidden states, of residues.

    Attributes:
        layer: from 1; the last is after the final layer norm.
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
        against_frozen: what quantisation costs.
        against_full: what a user sees.
        by_class: against frozen, residues by structural class; empty where no class is known.
        by_length: likewise, by the protein's length.
        by_position: likewise, by the residue's position.
        by_layer: likewise, layer by layer.
    """

    against_frozen: TokenAccuracy
    against_full: TokenAccuracy
    by_class: Mapping[str, Accuracy]
    by_length: Mapping[str, Accuracy]
    by_position: Mapping[str, Accuracy]
    by_layer: tuple[LayerAccuracy, ...]


@dataclass(frozen=True)
class Extend:
    """Figure 2 of one preset at one k and w.

    Attributes:
        new_residues: k, the last residues of a protein, which extend what stands before them.
        refreshed: w, the residues of the context that run again with them.
        proteins: how many were long enough.
        skipped: how many were not.
        against_frozen: what quantisation costs; None where no protein was long enough.
        against_full: what a user sees, likewise.
    """

    new_residues: int
    refreshed: int
    proteins: int
    skipped: int
    against_frozen: TokenAccuracy | None
    against_full: TokenAccuracy | None


@dataclass(frozen=True)
class Memory:
    """Figure 3: what a cache of one protein takes.

    Attributes:
        tokens: of the protein, `<cls>` and `<eos>` included.
        nbytes: everything that is stored for them.
        bits_per_element: 8 nbytes over the number of key and value components.
        ratio_to_fp32: how many times smaller than keys and values in float32.
        ratio_to_fp16: than in float16.
        calibration_nbytes: the codec's own parameters, shared by all caches and not counted above.
    """

    tokens: int
    nbytes: int
    bits_per_element: float
    ratio_to_fp32: float
    ratio_to_fp16: float
    calibration_nbytes: int


@dataclass(frozen=True)
class OutlierAccuracy:
    """Figure 5 of one preset at one scale: leave-one-out on a model with planted outliers.

    Attributes:
        scale: how many times larger a pair of key and of value channels of every head was made.
        against_frozen: the preset against full precision, both on the changed model.
    """

    scale: float
    against_frozen: TokenAccuracy


@dataclass(frozen=True)
class PresetEvaluation:
    """All figures of one preset.

    Attributes:
        name: the preset's.
        options: its `TurboConfig`.
        memory: figure 3.
        leave_one_out: figure 1.
        extend: figure 2, for every k and w.
        outliers: figure 5, for every scale; empty where it was switched off, and for full precision.
    """

    name: str
    options: Mapping[str, Any]
    memory: Memory
    leave_one_out: LeaveOneOut
    extend: tuple[Extend, ...]
    outliers: tuple[OutlierAccuracy, ...]


@dataclass(frozen=True)
class FrozenExtend:
    """Frozen against full at one k and w: what freezing costs, whatever the preset.

    Attributes:
        new_residues: k.
        refreshed: w.
        against_full: None where no protein was long enough.
    """

    new_residues: int
    refreshed: int
    against_full: TokenAccuracy | None


@dataclass(frozen=True)
class Frozen:
    """The frozen arm: contexts at full precision.

    Attributes:
        leave_one_out: frozen against full, equal to rounding.
        extend: frozen against full for every k and w.
    """

    leave_one_out: TokenAccuracy
    extend: tuple[FrozenExtend, ...]


@dataclass(frozen=True)
class PlantedModel:
    """One model with outliers, and how far planting them changed it.

    Attributes:
        scale: of the channels.
        drift: the whole forward of the changed model against the unchanged one's.
    """

    scale: float
    drift: TokenAccuracy


@dataclass(frozen=True)
class OutlierSetup:
    """How figure 5 was made.

    Attributes:
        proteins: evaluated, the first ones.
        calibration_proteins: shipped ones that every changed model was calibrated on.
        models: one per scale.
    """

    proteins: int
    calibration_proteins: int
    models: tuple[PlantedModel, ...]


@dataclass(frozen=True)
class Provenance:
    """What was measured, on what.

    Attributes:
        model: hub id or the name of a folder.
        geometry: layers, heads and components per head.
        dtype: of the model.
        device: where it ran.
        device_name: the accelerator's name, or the processor's.
        backend: what ran the packed attention.
        versions: of Python and packages.
        commit: of the source, None where it is unknown.
        dirty: whether the source differed from the commit.
        calibration: the calibration's own record; None without one.
        proteins: how many were evaluated.
        residues: in all of them.
        sequences_sha256: of the sequences, one a line.
    """

    model: str
    geometry: Mapping[str, int]
    dtype: str
    device: str
    device_name: str
    backend: str
    versions: Mapping[str, str]
    commit: str | None
    dirty: bool | None
    calibration: Mapping[str, Any] | None
    proteins: int
    residues: int
    sequences_sha256: str


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and memory of presets on proteins.

    Three computations are compared: *full* recomputes the whole sequence; *frozen* extends a stored context at full
    precision; *turbo* extends the same context as a preset stores it. The freezing error is full against frozen, the
    quantisation error frozen against turbo.

    Attributes:
        provenance: what was measured, on what.
        frozen: the frozen arm.
        presets: the turbo arm, preset by preset, in the order asked for.
        outliers: how the outliers of figure 5 were planted; None where it was switched off.
        unavailable: presets that were asked for as part of "all" and cannot run here, with the reason.
    """

    provenance: Provenance
    frozen: Frozen
    presets: tuple[PresetEvaluation, ...]
    outliers: OutlierSetup | None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> PresetEvaluation:
        """The figures of a preset.

        Raises:
            KeyError: it was not evaluated.
        """
        for preset in self.presets:
            if preset.name == name:
                return preset
        raise KeyError(f"{name!r} was not evaluated, only {[preset.name for preset in self.presets]}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: dictionaries, lists, strings, finite numbers, booleans and None."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))
        return values

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=indent)

    def table(self, width: int | None = None) -> str:
        """The figures as text, a few tables.

        Args:
            width: columns to wrap to, as far as no figure is cut; None wraps nothing.
        """
        from esm_turbo.evaluate.tables import render

        return render(self, width)
