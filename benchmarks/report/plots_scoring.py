"""Images of scoring: agreement with the full arm against what it costs, by residues refreshed."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks.harness.names import REFRESHES
from benchmarks.report import tables_scoring
from benchmarks.report.tables_scoring import speed_record, variant_record

_SCREENING = {
    "frozen, masks as placeholder": ("frozen", "frozen, masked"),
    "frozen, no placeholder": ("frozen", "frozen, empty"),
    "turbo3, masks as placeholder": ("turbo", "turbo3, masked"),
}
_VARIANTS = {"frozen": ("frozen", "frozen, masked"), "turbo3": ("turbo", "turbo3, masked")}
_MARKERS = "os^"
_POINTS = f"points from right to left: {', '.join(map(str, REFRESHES))} residues refreshed"


def screening() -> Figure:
    """Ranking of peptides: Spearman's correlation and the difference, against candidates a second."""
    ratios = speed_record("scoring_12_on_500")["figures"]["ratios"]
    found = tables_scoring.screened()
    figure = Figure(figsize=(8.7, 4))
    axes = figure.subplots(1, 2)
    names = {"spearman": "mean Spearman correlation with full", "mean_difference": "mean difference (nats per residue)"}
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for marker, (curve, (arm, prefix)) in zip(_MARKERS, _SCREENING.items(), strict=True):
            speeds = [ratios[f"{arm}, {refresh} refreshed, 1000 candidates / full"] for refresh in REFRESHES]
            _curve(axis, speeds, [found[f"{prefix}, {refresh}"][name] for refresh in REFRESHES], curve, marker)
        axis.set(xscale="log", xlabel="speedup over full", ylabel=label)
        _plain_ticks(axis)
        axis.grid(alpha=0.3)
    figure.suptitle(_POINTS, fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def variants() -> Figure:
    """Variant effects: Spearman's correlation with fitness and with the full arm, against speed."""
    ratios = speed_record("variant_positions")["figures"]["ratios"]
    arms = variant_record("fitness")["figures"]["arms"]
    figure = Figure(figsize=(8.7, 4))
    axes = figure.subplots(1, 2)
    names = {
        "spearman_with_measured": "Spearman with measured fitness",
        "spearman_with_full": "Spearman with full, masked",
    }
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for marker, (curve, (arm, prefix)) in zip(_MARKERS, _VARIANTS.items(), strict=False):
            speeds = [ratios[f"full / {arm}, {refresh} refreshed"] for refresh in REFRESHES]
            _curve(axis, speeds, [arms[f"{prefix}, {refresh}"][name] for refresh in REFRESHES], curve, marker)
        if name == "spearman_with_measured":
            axis.axhline(arms["full, masked"][name], color="black", linewidth=1, label="full, masked marginals")
            axis.axhline(arms["full, wild_type"][name], color="black", linestyle=":", label="full, wild-type marginals")
        axis.set(xscale="log", xlabel="speedup over full, masked marginals", ylabel=label)
        _plain_ticks(axis)
        axis.grid(alpha=0.3)
    figure.suptitle(_POINTS, fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _plain_ticks(axis: Axes) -> None:
    """Speeds as plain numbers on a logarithmic axis."""
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())


def _curve(axis: Axes, speeds: list[float], values: list[float], label: str, marker: str) -> None:
    """One arm, a point per number of refreshed residues."""
    axis.plot(speeds, values, marker=marker, markersize=4, label=label)


PLOTS: dict[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {
    "screening": (screening, ("screening", "cpu")),
    "variants": (variants, ("variants", "cpu")),
}
