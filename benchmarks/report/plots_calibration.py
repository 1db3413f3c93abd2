"""Images of calibrations: spectra, bits of components, levels, the number of proteins, and classes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib import cm, colormaps, colors
from matplotlib.figure import Figure

from benchmarks.report.tables_calibration import shift, sizes
from benchmarks.report.tables_paper import newest_calibration

_KINDS = {"key": "keys", "value": "values"}


def spectra() -> Figure:
    """Variance and cost of components by layer: what a rotation gathers, and what an error of it does."""
    found = newest_calibration()["figures"]["spectra"]
    shown = {
        "variance, channels": "variance, channels",
        "variance, svd": "variance, SVD",
        "cost, svd": "cost, SVD",
        "cost, turbo": "cost, turbo",
    }
    figure = Figure(figsize=(8.7, 5.2))
    axes = figure.subplots(2, 4, sharex=True, sharey=True)
    for row, kind in enumerate(_KINDS):
        for column, (name, title) in enumerate(shown.items()):
            axis, values = axes[row, column], np.array(found[kind][name])
            layers, heads, components = values.shape
            share = values / values.mean(axis=-1, keepdims=True)
            # Every fourth is enough for a line, and keeps the image small.
            at = np.unique(np.append(np.arange(0, components, 4), components - 1))
            lines = np.sort(share, axis=-1)[..., ::-1][..., at]
            for layer in range(layers):
                # One line a layer, with gaps between heads.
                ys = np.concatenate([lines[layer], np.full((heads, 1), np.nan)], axis=1).ravel()
                xs = np.tile(np.append(at + 1.0, np.nan), heads)
                axis.plot(xs, ys, linewidth=0.5, alpha=0.6, color=_layer_colour(layer, layers))
            axis.set(yscale="log", ylim=(1e-4, 64), title=title if row == 0 else "")
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("component")
    for axis, plural in zip(axes[:, 0], _KINDS.values(), strict=True):
        axis.set_ylabel(f"{plural}: relative to the head's mean")
    scale = cm.ScalarMappable(colors.Normalize(1, layers), "viridis")
    figure.colorbar(scale, ax=axes, label="layer (one line per head)", shrink=0.6)
    return figure


def allocation() -> Figure:
    """Bits of every component by layer, for every turbo preset; all heads of a layer share them."""
    found = newest_calibration()["figures"]["widths"]
    figure = Figure(figsize=(8.7, 1.8 * len(found)))
    axes = figure.subplots(len(found), 2, squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for row, (preset, kinds) in enumerate(found.items()):
        for column, (kind, plural) in enumerate(_KINDS.items()):
            axis, widths = axes[row, column], np.array(kinds[kind])
            layers, components = widths.shape
            image = axis.imshow(widths, vmin=0, vmax=8, aspect="auto", cmap="magma_r", interpolation="nearest",
                                extent=(0.5, components + 0.5, layers + 0.5, 0.5))  # fmt: skip
            axis.set(title=f"{preset}, {plural}: {widths.mean():.2f} bits on average",
                     yticks=range(2, layers + 1, 2))  # fmt: skip
    for axis in axes[-1]:
        axis.set_xlabel("component")
    for axis in axes[:, 0]:
        axis.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="bits", shrink=0.6)
    return figure


def allocation_by_head() -> Figure:
    """Expected error of every head's components: the cost that their bits leave."""
    found = newest_calibration()["figures"]
    figure = Figure(figsize=(8.7, 3.5))
    axes = figure.subplots(1, 2, sharey=True)
    image: Any = None
    for axis, (kind, plural) in zip(axes, _KINDS.items(), strict=True):
        costs, widths = np.array(found["spectra"][kind]["cost, turbo"]), np.array(found["widths"]["turbo3"][kind])
        # An even step halves with every bit, its squared error quarters.
        left = (costs * 4.0 ** -widths[:, None]).sum(-1) / costs.sum(-1)
        image = axis.imshow(np.log10(left), aspect="auto", cmap="viridis", vmin=-4.5, vmax=-2.5,
                            extent=(0.5, left.shape[1] + 0.5, left.shape[0] + 0.5, 0.5))  # fmt: skip
        axis.set(title=f"turbo3, {plural}", xlabel="head", xticks=range(1, left.shape[1] + 1))
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="log10 of the remaining share of the cost", extend="both")
    return figure


def levels() -> Figure:
    """Levels of turbo3 by width, in standard deviations, and the paper's tables of one head a layer."""
    found = newest_calibration()["figures"]
    figure = Figure(figsize=(8.7, 5.8))
    axes = figure.subplots(2, 2)
    for row, (kind, plural) in enumerate(_KINDS.items()):
        axis = axes[row, 0]
        # Two hundred levels are a bar.
        grids = {int(width): grid for width, grid in found["levels"]["turbo3"][kind].items() if int(width) <= 6}
        for width, grid in grids.items():
            axis.plot(grid, [width] * len(grid), "|", markersize=10)
        axis.set(title=f"turbo3, {plural}", xlabel="standard deviations", ylabel="bits", yticks=list(grids))
        axis.grid(alpha=0.3)
        axis = axes[row, 1]
        tables, steps = np.array(found["paper_levels"][kind])[:, 0], np.array(found["paper_steps"][kind])[:, 0]
        for layer, (table, step) in enumerate(zip(tables, steps, strict=True)):
            axis.errorbar(table, [layer + 1] * len(table), xerr=step, fmt=".", color=_layer_colour(layer, len(tables)))
        axis.set(title=f"paper, {plural} of head 1: levels ± sign step", xlabel="value",
                 ylabel="layer", yticks=range(1, len(tables) + 1))  # fmt: skip
    return figure


def calibration_size() -> Figure:
    """KL by the number of proteins calibrated on."""
    found = sizes()
    figure = Figure(figsize=(8.7, 4))
    sets = {"cath_val200": "CATH domains", "long_human": "proteins of 600 to 1,022 residues"}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (proteins, title) in zip(axes, sets.items(), strict=True):
        numbers = sorted(number for number, name in found if name == proteins)
        for index, preset in enumerate(found[numbers[0], proteins]):
            kls = [found[number, proteins][preset] for number in numbers]
            axis.plot(numbers, [statistics.mean(kl) for kl in kls], color=f"C{index}", marker="o", label=preset)
            axis.fill_between(numbers, [min(kl) for kl in kls], [max(kl) for kl in kls], color=f"C{index}", alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel="proteins calibrated on", title=title)
        axis.set_xticks(numbers, [str(number) for number in numbers])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean KL divergence (nats); bands: all draws")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def class_shift() -> Figure:
    """KL by what was calibrated on and what was measured on, over that of a calibration on the measured class."""
    presets = ("paper", "turbo2")
    figure = Figure(figsize=(8.7, 4.3))
    axes = figure.subplots(1, len(presets), sharey=True)
    image: Any = None
    for axis, preset in zip(axes, presets, strict=True):
        found = shift("class", preset)
        rows = sorted(found, key=lambda name: name not in found[name])
        columns = [name for name in rows if name in found[rows[0]]]
        kls = np.array([[found[row][column]["kl_mean"] for column in columns] for row in rows])
        ratio = kls / np.array([found[column][column]["kl_mean"] for column in columns])
        image = axis.imshow(ratio, cmap="coolwarm", norm=colors.LogNorm(0.25, 4), aspect="auto")
        for row, column in np.ndindex(ratio.shape):
            axis.text(column, row, f"{ratio[row, column]:.2f}", ha="center", va="center")
        axis.set_xticks(range(len(columns)), [name.replace("_", " ") for name in columns], rotation=30, ha="right")
        axis.set_yticks(range(len(rows)), [name.replace("_", " ") for name in rows])
        axis.set(title=preset, xlabel="measured on")
    axes[0].set_ylabel("calibrated on")
    bar = figure.colorbar(image, ax=axes, label="KL relative to calibration on the measured class")
    bar.set_ticks([0.25, 0.5, 1, 2, 4], labels=["1/4", "1/2", "1", "2", "4"])
    bar.minorticks_off()
    return figure


def _layer_colour(layer: int, layers: int) -> tuple[float, ...]:
    return colormaps["viridis"](layer / max(1, layers - 1))


PLOTS: dict[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {
    "spectra": (spectra, ("calibration",)),
    "allocation": (allocation, ("calibration",)),
    "allocation_by_head": (allocation_by_head, ("calibration",)),
    "levels": (levels, ("calibration",)),
    "calibration_size": (calibration_size, ("calibration_size",)),
    "class_shift": (class_shift, ("class_shift",)),
}
