"""Images of scoring: agreement with the full arm against what it costs, by residues refreshed."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import tables_scoring
from benchmarks.report.tables_scoring import speed_record, variant_record
from benchmarks.speed.scoring import REFRESHES

_SCREENING = {
    "frozen, context with masks in the candidate's place": ("frozen", "frozen, masked"),
    "frozen, context alone": ("frozen", "frozen, empty"),
    "turbo3, context with masks in the candidate's place": ("turbo", "turbo3, masked"),
}
_VARIANTS = {"frozen": ("frozen", "frozen, masked"), "turbo3": ("turbo", "turbo3, masked")}
_MARKERS = "os^"


def screening() -> Figure:
    """Ranking of peptides: Spearman's correlation and the difference, against candidates a second."""
    ratios = speed_record("scoring_12_on_500")["figures"]["ratios"]
    found = tables_scoring.screened()
    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, 2)
    names = {"spearman": "mean Spearman correlation with full", "mean_difference": "mean difference, nats a residue"}
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for marker, (curve, (arm, prefix)) in zip(_MARKERS, _SCREENING.items(), strict=True):
            speeds = [ratios[f"{arm}, {refresh} refreshed, 1000 candidates / full"] for refresh in REFRESHES]
            _curve(axis, speeds, [found[f"{prefix}, {refresh}"][name] for refresh in REFRESHES], curve, marker)
        axis.set(xscale="log", xlabel="candidates a second, times those of full", ylabel=label)
        axis.grid(alpha=0.3, which="both")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def variants() -> Figure:
    """Variant effects: Spearman's correlation with fitness and with the full arm, against speed."""
    ratios = speed_record("variant_positions")["figures"]["ratios"]
    arms = variant_record("fitness")["figures"]["arms"]
    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, 2)
    names = {"spearman_with_measured": "Spearman with measured fitness", "spearman_with_full": "Spearman with full"}
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for marker, (curve, (arm, prefix)) in zip(_MARKERS, _VARIANTS.items(), strict=False):
            speeds = [ratios[f"full / {arm}, {refresh} refreshed"] for refresh in REFRESHES]
            _curve(axis, speeds, [arms[f"{prefix}, {refresh}"][name] for refresh in REFRESHES], curve, marker)
        if name == "spearman_with_measured":
            axis.axhline(arms["full, masked"][name], color="black", linewidth=1, label="full, masked marginals")
            axis.axhline(arms["full, wild_type"][name], color="black", linestyle=":", label="full, wild-type marginals")
        axis.set(xscale="log", xlabel="times as fast as full, masked marginals", ylabel=label)
        axis.grid(alpha=0.3, which="both")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _curve(axis: Axes, speeds: list[float], values: list[float], label: str, marker: str) -> None:
    """One arm; the number at a point says how many residues are refreshed."""
    axis.plot(speeds, values, marker=marker, markersize=4, label=label)
    for refresh, x, y in zip(REFRESHES, speeds, values, strict=True):
        axis.annotate(str(refresh), (x, y), textcoords="offset points", xytext=(3, 4), fontsize=7)


PLOTS: dict[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {
    "screening": (screening, ("screening", "cpu")),
    "variants": (variants, ("variants", "cpu")),
}
