"""The accuracy that was measured of a calibration, as its file keeps it, and what is expected of a preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from esm_turbo.config import PRODUCT_PRESETS


class InaccuratePresetWarning(UserWarning):
    """A preset is less accurate on a model than is expected of it."""


class Expected(NamedTuple):
    """The accuracy expected of a preset, about ten times the errors on the embedded model.

    Attributes:
        cosine_mean: lowest mean cosine with the hidden states of exact contexts.
        kl_mean: highest mean divergence from their predictions, nats.
    """

    cosine_mean: float
    kl_mean: float


EXPECTED = {
    "turbo4": Expected(0.999, 0.0005),
    "turbo3": Expected(0.997, 0.0015),
    "turbo2": Expected(0.985, 0.007),
    "turbo1": Expected(0.9, 0.07),
    "paper": Expected(0.9, 0.07),
}
"""By preset; others are not judged."""


@dataclass(frozen=True)
class Figures:
    """Errors over residues; the fields of `evaluate.Accuracy` of these names."""

    cosine_mean: float
    cosine_q01: float
    kl_mean: float
    kl_q99: float
    top1_agreement: float


@dataclass(frozen=True)
class EightBits:
    """What the precision fp8 costs a model: whole forwards against those of the model in bfloat16.

    Attributes:
        every: with every product in eight bits.
        chosen: with all but those kept.
        keep: products that stay in bfloat16, each a layer and a name, see `model.precision`.
    """

    every: Figures
    chosen: Figures
    keep: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Quality:
    """Accuracy of presets with one calibration, on proteins that it has not seen.

    Attributes:
        proteins: number of proteins.
        residues: their residues.
        sequences_sha256: of the sequences, each after its homologs, one per line.
        dtype: of the model that was measured.
        device: type of its device.
        presets: by preset, the quantisation error: every residue in turn is new, against contexts at full precision.
        new_residues: number of last residues that extended a context of the others, for the freezing error.
        freezing: by number of residues refreshed, contexts at full precision against the whole forward; empty if all
            proteins were too short.
        eight_bits: what the precision fp8 costs; None if it was not measured.
    """

    proteins: int
    residues: int
    sequences_sha256: str
    dtype: str
    device: str
    presets: Mapping[str, Figures]
    new_residues: int
    freezing: Mapping[int, Figures]
    eight_bits: EightBits | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        values["freezing"] = {str(refreshed): figures for refreshed, figures in values["freezing"].items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, unknown or of another type.
        """
        # JSON may have them in any order; those that are not judged come last.
        order = {name: number for number, name in enumerate(PRODUCT_PRESETS)}
        named = sorted(values["presets"].items(), key=lambda item: order.get(item[0], len(order)))
        presets = {name: Figures(**figures) for name, figures in named}
        freezing = {int(refreshed): Figures(**figures) for refreshed, figures in values["freezing"].items()}
        measured = values.get("eight_bits")
        eight_bits = measured and EightBits(
            Figures(**measured["every"]),
            Figures(**measured["chosen"]),
            tuple((int(layer), str(name)) for layer, name in measured["keep"]),
        )
        read = {"presets": presets, "freezing": dict(sorted(freezing.items())), "eight_bits": eight_bits}
        return cls(**{**values, **read})

    def shortfall(self, preset: str) -> str | None:
        """How a preset falls short of what is expected of it, in one line; None if it does not, or is not known."""
        found, expected = self.presets.get(preset), EXPECTED.get(preset)
        if found is None or expected is None:
            return None
        if found.cosine_mean >= expected.cosine_mean and found.kl_mean <= expected.kl_mean:
            return None
        return (
            f"preset {preset!r} is inaccurate on this model: mean cosine {found.cosine_mean:.5f} and KL"
            f" {found.kl_mean:.2g} nats against contexts at full precision, where at least {expected.cosine_mean:g} and"
            f" at most {expected.kl_mean:g} are expected; choose a preset of more bits, or 'exact'"
        )
