"""Draws the images of accuracy in docs/images/ from the files in benchmarks/results/, and from nothing else.

    python -m benchmarks.report.plots [--check]

An image says which results it was made from; `--check` draws nothing and exits 1 where that is not what is stored now.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import records, stored
from benchmarks.harness.names import COMPRESSED
from benchmarks.report.tables_accuracy import by_bits

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
# Text stays text, so that an image can be searched; ids are the same in every run. Figures are drawn about as wide as
# pages show them, so that these font sizes are the displayed ones.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "esm_turbo",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
_TURBO = [name for name in COMPRESSED if name.startswith("turbo")]
_FAMILIES: Mapping[str, Sequence[str]] = {
    "turbo": _TURBO,
    "TurboESM paper": ["paper"],
    "TurboQuant": ["turboquant4", "turboquant3", "turboquant2"],
    "TurboQuant prod": ["turboquant_prod4", "turboquant_prod3"],
    "hybrid": ["tq35", "tq25"],
    "PolarQuant + QJL": ["polarquant4", "polarquant3"],
    "QJL": ["qjl_outliers", "qjl"],
    "spectral": ["spectral_layers", "spectral8", "spectral"],
    "KIVI": ["kivi4", "kivi2"],
    "int": ["int8", "int4"],
    "fp8": ["fp8"],
}
_MARKERS = "osD^v<>Pp*h"
_FREEZING = "freezing error"
_SETS = {"cath_val200": "CATH domains", "long_human": "proteins of 600 to 1,022 residues"}
# What rounding of float32 leaves; a code that is better is shown there.
_FLOOR = 1e-7


def pareto() -> Figure:
    """Bits per element against KL and against 1 - cosine, every codec, on both protein sets."""
    figure = Figure(figsize=(8.7, 8))
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    figures = {"kl_mean": "mean KL divergence (nats)", "cosine_mean": "1 - mean cosine"}
    for column, (proteins, title) in enumerate(_SETS.items()):
        records = by_bits(proteins)
        if not records:
            raise LookupError(f"no records of presets on {proteins}")
        for row, (name, label) in enumerate(figures.items()):
            axis = axes[row, column]
            points = {preset: _point(record["figures"]["preset"], name) for preset, record in records.items()}
            _draw_families(axis, points)
            axis.set(yscale="log", ylabel=label if column == 0 else "", title=title if row == 0 else "")
            axis.grid(alpha=0.3, which="major")
            if row == 1:
                axis.set_xlabel("bits per element, all storage counted")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def freezing() -> Figure:
    """Freezing error and quantisation error by residues refreshed."""
    figure = Figure(figsize=(8.7, 3.8))
    axes = figure.subplots(1, 3, sharey=True)
    frozen = stored.accuracy("cath_val200", "exact", "extend")["figures"]["preset"]["extend"]
    arms: dict[str, list[dict[str, Any]]] = {_FREEZING: [_side(e, "against_full") for e in frozen]}
    for name in _TURBO:
        extend = stored.accuracy("cath_val200", name, "extend")["figures"]["preset"]["extend"]
        arms[f"quantisation error, {name}"] = [_side(e, "against_frozen") for e in extend]
    news = sorted({entry["new"] for entry in arms[_FREEZING]})
    for axis, new in zip(axes, news, strict=True):
        for name, entries in arms.items():
            chosen = [entry for entry in entries if entry["new"] == new]
            axis.plot(
                [entry["refreshed"] for entry in chosen],
                [entry["error"] for entry in chosen],
                marker="o",
                markersize=4,
                color="black" if name == _FREEZING else None,
                linestyle="--" if name == _FREEZING else "-",
                label=name,
            )
        axis.set(yscale="log", xlabel="residues refreshed", title=f"{new} new residue{'s' if new > 1 else ''}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("1 - mean cosine")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_families(axis: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    for index, (family, names) in enumerate(_FAMILIES.items()):
        known = [name for name in names if name in points]
        if not known:
            continue
        bits, errors = zip(*(points[name] for name in known), strict=True)
        ours = family == "turbo"
        # Points of most codecs lie too close for labels of their own, so that the legend names them.
        label = family if ours else ", ".join(known)
        colour = colormaps["tab10"](index) if index < 10 else colormaps["Dark2"](index - 10)
        axis.plot(bits, errors, color=colour, marker=_MARKERS[index], label=label, markersize=6,
                  linewidth=2 if ours else 1, alpha=1.0 if ours else 0.7)  # fmt: skip
        for name in known if ours else ():
            axis.annotate(name, points[name], xytext=(6, 3), textcoords="offset points", fontsize=8.5, color=colour)


def _point(preset: Mapping[str, Any], name: str) -> tuple[float, float]:
    figures = preset["leave_one_out"]["against_frozen"]["residues"]
    error = 1 - figures[name] if name == "cosine_mean" else figures[name]
    return preset["memory"]["bits_per_element"], max(_FLOOR, error)


def _side(entry: Mapping[str, Any], side: str) -> dict[str, Any]:
    return {
        "new": entry["new_residues"],
        "refreshed": entry["refreshed"],
        "error": max(_FLOOR, 1 - entry[side]["residues"]["cosine_mean"]),
    }


PLOTS: dict[str, Callable[[], Figure]] = {"pareto": pareto, "freezing": freezing}
"""Functions that draw, by the image's name."""


def draw(name: str, path: Path) -> None:
    """Draws one image.

    Args:
        name: of `PLOTS`.
        path: an SVG file.

    Raises:
        LookupError: the results that it shows are missing.
    """
    with matplotlib.rc_context(_STYLE):
        figure = PLOTS[name]()
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": source()})


def source() -> str:
    """The description by which an image names the results that it was made from."""
    digest = hashlib.sha256((records.RESULTS / "accuracy.jsonl").read_bytes())
    return f"made from results {digest.hexdigest()[:16]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing")
    check = parser.parse_args(arguments).check
    paths = {name: IMAGES / f"{name}.svg" for name in PLOTS}
    if not check:
        for name, path in paths.items():
            draw(name, path)
        return 0
    stale = [name for name, path in paths.items() if source() not in path.read_text(encoding="utf-8")]
    if stale:
        print(f"not of the stored results: {', '.join(stale)}; run python -m benchmarks.report.plots", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
