"""The shipped calibration in numbers: spectra, outlier channels, bits per component, and levels.

The *cost* of a component is the output error from leaving it out: its variance times the error per unit of it. In a
basis T the cost is (T^-T S T^-1)_ii (T C T^T)_ii, with C the covariance of keys or values and S the cost of their
errors, both as weighted by the turbo presets (docs/math.md). It is invariant to scaling of the component.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness.embedded import embedded, rounded
from benchmarks.harness.measure import Case, Check, Figures, worst
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.codecs import KVCodec
from esm_turbo.codecs.fitting import transforms
from esm_turbo.codecs.fitting.statistics import Array, KVStatistics
from esm_turbo.codecs.fitting.transforms import Transform
from esm_turbo.config import PRODUCT_PRESETS

TURBO_PRESETS = tuple(name for name, config in PRODUCT_PRESETS.items() if config.codec == "turbo")
KINDS = ("key", "value")
_DIGITS = 3
_TOLERANCE = 1e-3


def cases() -> Iterator[Case]:
    """One row with all figures of the shipped calibration."""
    yield Case(
        name="shipped calibration",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "axes": "layers, heads, components"},
        check=_check,
        measure=lambda repeats: _figures(),
    )


def component_widths(codec: KVCodec, kind: str) -> npt.NDArray[np.int64]:
    """Bits of every stored component of keys or values, [layers, head_dim].

    Args:
        codec: of a turbo preset.
        kind: one of `KINDS`.
    """
    widths = codec.state[f"{kind}_widths"].numpy()
    return np.repeat(widths, codec.geometry.head_dim // widths.shape[1], axis=1)


def level_grids(statistics: KVStatistics, codec: KVCodec, kind: str) -> dict[str, list[float]]:
    """Levels of every bit width in use, in standard deviations of a typical component of that width.

    The levels of the turbo presets are evenly spaced, with a step of one on the scale of the mapped components.
    """
    covariance, _ = moments(statistics, kind)
    own = _stored_basis(codec, kind)
    spread = np.sqrt(transforms.component_variances(own, covariance))
    widths = np.broadcast_to(component_widths(codec, kind)[:, None], spread.shape)
    return {
        str(width): ((np.arange(2**width) - (2**width - 1) / 2) / np.median(spread[widths == width])).tolist()
        for width in sorted({int(width) for width in widths.flat} - {0})
    }


def spectra(statistics: KVStatistics, codec: KVCodec, kind: str) -> dict[str, Array]:
    """Variances and costs of components, [layers, heads, head_dim] each.

    Args:
        statistics: of a calibration.
        codec: of a turbo preset fitted to them.
        kind: one of `KINDS`.

    Returns:
        `variance` of the channels and of the SVD components, `cost` of the SVD components and of the stored components;
        the last in the order of the codec, the others in descending order.
    """
    covariance, cost = moments(statistics, kind)
    channels, svd = transforms.identity(covariance.shape[:-1]), transforms.svd_rotation(covariance)
    own = _stored_basis(codec, kind)
    return {
        "variance, channels": _falling(transforms.component_variances(channels, covariance)),
        "variance, svd": _falling(transforms.component_variances(svd, covariance)),
        "cost, svd": _falling(component_costs(svd, covariance, cost)),
        "cost, turbo": component_costs(own, covariance, cost),
    }


def moments(statistics: KVStatistics, kind: str) -> tuple[Array, Array]:
    """Covariance of keys or values, and the cost of their errors, [layers, heads, head_dim, head_dim] each."""
    sensitivity = statistics.sensitivity
    if kind == "key":
        return sensitivity.keys.covariance, sensitivity.queries
    return sensitivity.values.covariance, statistics.output_gram * sensitivity.attention[..., None, None]


def component_costs(basis: Transform, covariance: Array, cost: Array) -> Array:
    """Cost of each component, [layers, heads, head_dim]; see the docstring of the module."""
    inverse = np.asarray(basis.inverse, dtype=np.float64)
    unit_errors = np.einsum("lhji,lhjk,lhki->lhi", inverse, cost, inverse, optimize=True)
    return np.asarray(unit_errors * transforms.component_variances(basis, covariance))


def outlier_ratios(statistics: KVStatistics, kind: str) -> dict[str, Array]:
    """Ratios of outliers to the median, by layer, [layers] each.

    Returns:
        `channels`, the root mean square of the largest channel over that of the median channel; `entries`, the largest
        magnitude of a single value over the median magnitude, in the sample of residues of the calibration.
    """
    second = getattr(statistics.residues, f"{kind}s").second_moment
    rms = np.sqrt(np.diagonal(second, axis1=-2, axis2=-1)).reshape(len(second), -1)
    entries = np.abs(getattr(statistics.sample.residues(), f"{kind}s")).reshape(len(second), -1)
    return {
        "channels": np.asarray(rms.max(axis=1) / np.median(rms, axis=1)),
        "entries": np.asarray(entries.max(axis=1) / np.median(entries, axis=1)).astype(np.float64),
    }


def _stored_basis(codec: KVCodec, kind: str) -> Transform:
    """The linear maps of keys or values before quantisation."""
    layers = [codec.layer_state(layer, torch.device("cpu")) for layer in range(codec.geometry.num_layers)]
    forward, inverse = (np.stack([layer[f"{kind}_{part}"].numpy() for layer in layers]) for part in ("map", "inverse"))
    return Transform(forward, inverse)


def _figures() -> Figures:
    calibration = embedded().calibration
    assert calibration is not None
    statistics = calibration.statistics
    turbo = {name: calibration.codec(name) for name in TURBO_PRESETS}
    paper = calibration.codec("paper").state
    return {
        "provenance": {name: calibration.provenance.get(name) for name in ("sequences", "residues", "fasta")},
        "spectra": {kind: _rounded(spectra(statistics, turbo["turbo3"], kind)) for kind in KINDS},
        "outlier_ratios": {kind: _rounded(outlier_ratios(statistics, kind)) for kind in KINDS},
        "widths": {
            name: {kind: component_widths(codec, kind).tolist() for kind in KINDS} for name, codec in turbo.items()
        },
        "levels": {
            name: {kind: rounded(level_grids(statistics, codec, kind)) for kind in KINDS}
            for name, codec in turbo.items()
        },
        "paper_levels": _rounded({kind: paper[f"{kind}_levels"].numpy().astype(np.float64) for kind in KINDS}),
        "paper_steps": _rounded({kind: paper[f"{kind}_step"].numpy().astype(np.float64) for kind in KINDS}),
    }


def _check() -> Check:
    """The costs of the stored components sum to the total cost in any basis."""
    calibration = embedded().calibration
    assert calibration is not None
    statistics, codec = calibration.statistics, calibration.codec("turbo3")
    errors = []
    for kind in KINDS:
        covariance, cost = moments(statistics, kind)
        whole = np.einsum("lhij,lhji->lh", covariance, cost, optimize=True)
        errors.append(float(abs(spectra(statistics, codec, kind)["cost, turbo"].sum(-1) / whole - 1).max()))
    return Check("sum of the costs of turbo's components against tr(S C), relative", worst(errors), _TOLERANCE)


def _falling(rows: Array) -> Array:
    return np.asarray(np.sort(rows, axis=-1)[..., ::-1])


def _rounded(arrays: dict[str, Array]) -> Figures:
    def plain(value: object) -> object:
        return [plain(v) for v in value] if isinstance(value, list) else float(f"{value:.{_DIGITS}g}")

    return {name: plain(np.asarray(array).tolist()) for name, array in arrays.items()}
