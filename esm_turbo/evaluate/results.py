"""The typed result of an evaluation, and its JSON form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from esm_turbo.evaluate.metrics import Accuracy
from esm_turbo.files.tabular import Tabular, counted, named


@dataclass(frozen=True)
class TokenAccuracy:
    """One comparison, with residues and special tokens separate.

    Attributes:
        residues: of the residues.
        special_tokens: of `<cls>` and `<eos>`.
    """

    residues: Accuracy
    special_tokens: Accuracy


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


@dataclass(frozen=True)
class Extend:
    """Figure 2 of one preset for one k and w.

    Attributes:
        new_residues: k, the number of last residues, which extend a context of the others.
        refreshed: w, the number of context residues recomputed with them.
        proteins: number of proteins that were long enough.
        skipped: number of proteins that were too short.
        against_frozen: the quantisation error; None if no protein was long enough.
        against_full: the total error, likewise.
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
class OutlierAccuracy:
    """Figure 5 of one preset for one scale: leave-one-out on a model with planted outliers.

    Attributes:
        scale: factor of one pair of key channels and one of value channels of every head.
        against_frozen: the preset against full precision, both on the modified model.
    """

    scale: float
    against_frozen: TokenAccuracy


@dataclass(frozen=True)
class PresetEvaluation:
    """All figures of one preset.

    Attributes:
        name: of the preset.
        options: its `TurboConfig`.
        memory: figure 3.
        leave_one_out: figure 1.
        extend: figure 2, for every k and w.
        outliers: figure 5, for every scale; empty if disabled, and for full precision.
    """

    name: str
    options: Mapping[str, Any]
    memory: Memory
    leave_one_out: LeaveOneOut
    extend: tuple[Extend, ...]
    outliers: tuple[OutlierAccuracy, ...]


@dataclass(frozen=True)
class FrozenExtend:
    """Frozen against full for one k and w: the freezing error, which is the same for all presets.

    Attributes:
        new_residues: k.
        refreshed: w.
        against_full: None if no protein was long enough.
    """

    new_residues: int
    refreshed: int
    against_full: TokenAccuracy | None


@dataclass(frozen=True)
class Frozen:
    """The frozen arm: contexts at full precision.

    Attributes:
        leave_one_out: frozen against full, equal up to rounding.
        extend: frozen against full for every k and w.
    """

    leave_one_out: TokenAccuracy
    extend: tuple[FrozenExtend, ...]


@dataclass(frozen=True)
class PlantedModel:
    """One model with planted outliers, and its deviation from the original.

    Attributes:
        scale: of the channels.
        drift: the forward pass of the modified model against that of the original.
    """

    scale: float
    drift: TokenAccuracy


@dataclass(frozen=True)
class OutlierSetup:
    """Setup of figure 5.

    Attributes:
        proteins: number of proteins evaluated, the first ones.
        calibration_proteins: number of shipped proteins that every modified model was calibrated on.
        models: one per scale.
    """

    proteins: int
    calibration_proteins: int
    models: tuple[PlantedModel, ...]


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
        commit: of the source; None if unknown.
        dirty: whether the source differed from the commit.
        calibration: provenance of the calibration; None without one.
        proteins: number of proteins evaluated.
        residues: their total number of residues.
        sequences_sha256: of the sequences, one per line.
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
class Evaluation(Tabular):
    """Accuracy and memory of presets on proteins.

    Three computations are compared: *full* recomputes the whole sequence; *frozen* extends a context stored at full
    precision; *turbo* extends the same context as stored by a preset. The freezing error is frozen against full, the
    quantisation error turbo against frozen.

    Attributes:
        provenance: model, environment and data.
        frozen: the frozen arm.
        presets: the turbo arm, preset by preset, in the order requested.
        outliers: setup of figure 5; None if disabled.
        unavailable: presets of "all" that cannot run here, with the reason.
    """

    provenance: Provenance
    frozen: Frozen
    presets: tuple[PresetEvaluation, ...]
    outliers: OutlierSetup | None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = f"{counted(self.provenance.proteins, 'protein')}, {counted(self.provenance.residues, 'residue')}"
        return named(self, self.provenance.model, size, *(preset.name for preset in self.presets))

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["preset", "bits_per_element", "ratio_to_fp16", "cosine_mean", "cosine_q01", "kl_mean"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per preset its size, and figure 1 against full precision, residues only."""
        for preset in self.presets:
            found, memory = preset.leave_one_out.against_frozen.residues, preset.memory
            sizes = memory.bits_per_element, memory.ratio_to_fp16
            yield preset.name, *sizes, found.cosine_mean, found.cosine_q01, found.kl_mean

    def __getitem__(self, name: str) -> PresetEvaluation:
        """Figures of a preset.

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
        """JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=indent)

    def table(self, width: int | None = None) -> str:
        """Tables of text with all figures.

        Args:
            width: columns to wrap to, without cutting any figure; None does not wrap.
        """
        from esm_turbo.evaluate.tables import render

        return render(self, width)
