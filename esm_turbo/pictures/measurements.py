"""Pictures of the measurements of `evaluate` and `calibrate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from esm_turbo.calibration import Calibration
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.evaluate.evaluation import Evaluation
from esm_turbo.files.quality import Quality
from esm_turbo.files.tabular import counted
from esm_turbo.pictures.panels import Array, Bars, Heatmap, Lines, Panel, Scatter, Sheet, Table
from esm_turbo.tasks.calibration.records import NO_CLASS

# What rounding of float32 leaves; what is closer is drawn there, since the axis is logarithmic.
_FLOOR = 1e-7
_ERROR = "1 - mean cosine"


def evaluation_sheet(result: Evaluation) -> Sheet:
    """Accuracy against bits, errors by layer, and what freezing costs."""
    about = result.provenance
    # At full precision only rounding is left, which would squeeze the others.
    shown = [preset for preset in result.presets if preset.name != "exact"] or list(result.presets)
    names = [preset.name for preset in shown]
    bits = np.array([preset.memory.bits_per_element for preset in shown])
    figures = [preset.leave_one_out.against_frozen.residues for preset in shown]
    axis, labels = "bits per number, all storage counted", dict(enumerate(names))
    layout: list[Sequence[Panel]] = [
        [
            Scatter(bits, _floored([one.kl_mean for one in figures]), names, axis, "mean KL divergence (nats)",
                    "quantisation error, each residue in turn", labels=labels, log_y=True),
            Scatter(bits, _floored([1 - one.cosine_mean for one in figures]), names, axis, _ERROR,
                    "of final hidden states", labels=labels, log_y=True),
        ]
    ]  # fmt: skip
    by_layer = {
        preset.name: _floored([layer.relative_rms_error for layer in preset.leave_one_out.by_layer])
        for preset in shown
        if preset.leave_one_out.by_layer
    }
    if by_layer:
        # A single line has no legend.
        error = f"relative RMS error of hidden states{f', {names[0]}' if len(by_layer) == 1 else ''}"
        layers = list(range(1, 1 + len(next(iter(by_layer.values())))))
        layout.append([Lines(layers, by_layer, "layer", error, log_y=True)])
    layout += [panels] if (panels := _freezing(result)) else []
    caption = (
        f"model {about.model}, device {about.device}, {about.dtype}, backend {about.backend}. The freezing error is"
        " that of a context at full precision against the whole sequence; the quantisation error that of a preset"
        f" against such a context. Values below {_FLOOR:g} are drawn there."
    )
    size = f"{counted(about.proteins, 'protein')}, {counted(about.residues, 'residue')}"
    title = f"{counted(len(result.presets), 'preset')} on {size}"
    return Sheet(title, caption, layout, Table(result.columns(), list(result.rows())))


def _freezing(result: Evaluation) -> list[Panel]:
    """Errors of freezing and of compression, by residues refreshed, for each number of new residues."""
    arms = {
        f"{preset.name}, quantisation": [(one, one.against_frozen) for one in preset.extend]
        for preset in result.presets
        if preset.name != "exact"
    }
    arms["freezing error"] = [(one, one.against_full) for one in result.frozen.extend]
    panels: list[Panel] = []
    for new in sorted({one.new_residues for one in result.frozen.extend}):
        refreshed = sorted({one.refreshed for one in result.frozen.extend if one.new_residues == new})
        series = {}
        for name, entries in arms.items():
            found = {
                one.refreshed: 1 - side.residues.cosine_mean
                for one, side in entries
                if one.new_residues == new and side is not None
            }
            series[name] = _floored([found.get(count, np.nan) for count in refreshed])
        if any(np.isfinite(values).any() for values in series.values()):
            label = f"residues refreshed, {counted(new, 'new residue')}"
            panels.append(Lines(refreshed, series, label, _ERROR, log_y=True, markers=True))
    return panels


def _floored(values: Sequence[float]) -> Array:
    return np.maximum(np.array(values, dtype=np.float64), _FLOOR)


def calibration_sheet(calibration: Calibration, preset: str = DEFAULT_PRESET) -> Sheet:
    """The proteins, the spectra of keys and values, and the bits that a preset gives to their components.

    Args:
        calibration: the calibration.
        preset: one of the codec `turbo`.
    """
    about = calibration.provenance
    layers = [str(layer) for layer in range(1, calibration.geometry.num_layers + 1)]
    moments = calibration.statistics.residues
    spectra: list[Panel] = [
        _components(_spectrum(one.covariance), layers, f"{kind}: log10 of variance, relative to the mean")
        for kind, one in (("keys", moments.keys), ("values", moments.values))
    ]
    codec = calibration.codec(preset)
    bits: list[Panel] = []
    for kind in ("key", "value"):
        widths = codec.state[f"{kind}_widths"].numpy()
        each = np.repeat(widths, calibration.geometry.head_dim // widths.shape[1], axis=1).astype(np.float64)
        bits.append(_components(each, layers, f"{kind}s: bits in {preset}, mean {each.mean():.2f}", (0.0, 8.0)))
    counted_by: list[Panel] = [
        Bars(list(found), np.array([one["residues"] for one in found.values()], dtype=np.float64), "residues", title)
        for title, found in (("by structural class", about.get("classes")), ("by length", about.get("lengths")))
        if found and list(found) != [NO_CLASS]
    ]
    caption = (
        f"model {about.get('model', 'unknown')}, {counted(calibration.geometry.num_layers, 'layer')} of"
        f" {counted(calibration.geometry.num_heads, 'head')} of {calibration.geometry.head_dim}. Components are sorted"
        " by their variance in every head; spectra are means over heads. All heads of a layer share its bits."
    )
    title = f"Calibration on {_count(about, 'sequences', 'protein')}, {_count(about, 'residues', 'residue')}"
    rows = [
        [layer, *(float(panel.values[number].mean()) for panel in bits if isinstance(panel, Heatmap))]
        for number, layer in enumerate(layers)
    ]
    table = Table(["layer", f"key bits, {preset}", f"value bits, {preset}"], rows)
    quality = [] if calibration.quality is None else _quality(calibration.quality)
    return Sheet(title, caption, [row for row in (quality, counted_by, spectra, bits) if row], table)


def _quality(measured: Quality) -> list[Panel]:
    """Errors of the presets, and of freezing, on proteins outside the calibration."""
    shown = {name: one for name, one in measured.presets.items() if name != "exact"}
    where = f"on {counted(measured.proteins, 'other protein')}, {counted(measured.residues, 'residue')}"
    panels: list[Panel] = [
        Bars(list(shown), np.array([one.kl_mean for one in shown.values()]), "mean KL divergence (nats)",
             f"quantisation error {where}"),
    ]  # fmt: skip
    if measured.freezing:
        errors = np.array([1 - one.cosine_mean for one in measured.freezing.values()])
        panels.append(Lines(list(measured.freezing), {"freezing error": _floored(errors.tolist())},
                            f"residues refreshed, {counted(measured.new_residues, 'new residue')}",
                            f"freezing error, {_ERROR}", log_y=True, markers=True))  # fmt: skip
    return panels if shown else panels[1:]


def _count(about: Mapping[str, Any], name: str, noun: str) -> str:
    return counted(about[name], noun) if name in about else f"unknown {noun}s"


def _spectrum(covariance: Array) -> Array:
    """Variances along the principal axes, [layers, head_dim]: log10 of the ratio to their mean, mean over heads."""
    variances = np.linalg.eigvalsh(covariance)[..., ::-1]
    ratios = variances / variances.mean(axis=-1, keepdims=True)
    logs: Array = np.log10(np.maximum(ratios, _FLOOR)).mean(axis=1)
    return logs


def _components(values: Array, layers: list[str], label: str, limits: tuple[float, float] | None = None) -> Heatmap:
    columns = list(range(1, values.shape[1] + 1))
    names = [[f"layer {layer}, component {column}" for column in columns] for layer in layers]
    return Heatmap(values, layers, columns, label, "component", "layer", limits=limits, names=names)
