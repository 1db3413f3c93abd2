"""Draws the images of docs/images/ from the files in benchmarks/results/, and from nothing else.

    python -m benchmarks.report.plots [NAME ...] [--to FOLDER] [--check]

An image whose results are missing is left out, with a word about it. An image says which results it was made from;
`--check` draws nothing and exits 1 where that is not what is stored now.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.harness import records
from benchmarks.report import plots_accuracy, plots_scoring

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
PLOTS = plots_accuracy.PLOTS | plots_scoring.PLOTS
"""Functions that draw, and the result files that they read, by the image's name."""

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


def draw(name: str, path: Path) -> None:
    """Draws one image.

    Args:
        name: of `PLOTS`.
        path: an SVG file.

    Raises:
        LookupError: the results that it shows are missing.
    """
    with matplotlib.rc_context(_STYLE):
        figure = PLOTS[name][0]()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": source(name)})


def source(name: str) -> str:
    """The description by which an image names the results that it was made from."""
    digest = hashlib.sha256()
    for file in PLOTS[name][1]:
        path = records.RESULTS / f"{file}.jsonl"
        digest.update(path.read_bytes() if path.exists() else b"")
    return f"made from results {digest.hexdigest()[:16]}"


def is_current(name: str, path: Path) -> bool:
    """True if an image was made from the results that are stored now."""
    return path.exists() and source(name) in path.read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="images: " + ", ".join(PLOTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all by default")
    parser.add_argument("--to", type=Path, default=IMAGES, metavar="FOLDER")
    parser.add_argument("--check", action="store_true", help="draw nothing")
    options = parser.parse_args(arguments)
    names = options.names or list(PLOTS)
    unknown = sorted(set(names) - set(PLOTS))
    if unknown:
        parser.error(f"no such image: {', '.join(unknown)}; there are {', '.join(PLOTS)}")
    paths = {name: options.to / f"{name}.svg" for name in names}
    if options.check:
        stale = [name for name, path in paths.items() if not is_current(name, path)]
        if stale:
            print(
                f"not of the stored results: {', '.join(stale)}; run python -m benchmarks.report.plots", file=sys.stderr
            )
        return int(bool(stale))
    for name, path in paths.items():
        try:
            draw(name, path)
        except LookupError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
