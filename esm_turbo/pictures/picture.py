"""Pictures of results, and the files that hold them."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.files.extras import install_hint
from esm_turbo.files.suffixes import PICTURES, SuffixError, one_of
from esm_turbo.files.writing import replacing
from esm_turbo.pictures.panels import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esm_turbo.tasks.common.run_info import RunInfo

_DPI = 200
SINGLE = (".png", ".svg")
"""Suffixes of pictures of one sheet."""

MOST_SHEETS = 50
"""Sheets of a picture at most, besides a summary: a page of more would not open."""


class Picture:
    """The picture of a result: a sheet for each protein or target.

    Args:
        sheets: at least one.
    """

    def __init__(self, sheets: Sequence[Sheet]) -> None:
        self.sheets = list(sheets)

    def __repr__(self) -> str:
        return f"Picture({', '.join(repr(sheet.title) for sheet in self.sheets)})"

    def figure(self, sheet: int = 0) -> Figure:
        """A sheet as a figure of matplotlib, to change or to add to."""
        from esm_turbo.pictures.static import figure

        return figure(self.sheets[sheet])

    def save(self, out: str | os.PathLike[str]) -> None:
        """Write a file, atomically: `.pdf` or `.html` of all sheets, `.png` or `.svg` of one or the summary of several.

        Raises:
            ValueError: the suffix is another, or the format has no room for all sheets.
            OSError: the file cannot be written.
        """
        summary = self.sheets[0].summary
        suffix = check_picture(out, len(self.sheets) - summary, summary=summary)
        content = self._encoded(suffix)
        with replacing(out) as temporary:
            temporary.write_bytes(content)

    def _encoded(self, suffix: str) -> bytes:
        from matplotlib import rc_context
        from matplotlib.backends.backend_pdf import PdfPages

        from esm_turbo.pictures.page import page
        from esm_turbo.pictures.static import STYLE

        if suffix == ".html":
            return page(self.sheets).encode()
        buffer = io.BytesIO()
        with rc_context(STYLE):
            if suffix == ".pdf":
                with PdfPages(buffer, metadata={"CreationDate": None}) as pages:
                    for number in range(len(self.sheets)):
                        pages.savefig(self.figure(number), dpi=_DPI)
            else:
                metadata: Any = {"Date": None} if suffix == ".svg" else None
                self.figure().savefig(buffer, format=suffix[1:], dpi=_DPI, metadata=metadata)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        """The first sheet, for notebooks."""
        buffer = io.BytesIO()
        self.figure().savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


def check_picture(out: str | os.PathLike[str], sheets: int, *, summary: bool = False) -> str:
    """Check that a file can hold a picture; return its suffix.

    Args:
        out: its name.
        sheets: how many there are, without a summary.
        summary: whether one comes before them, which can stand for all.

    Raises:
        SuffixError: (a ValueError) the suffix is of no picture, or of one that holds a single sheet.
        ImportError: what draws it is missing.
    """
    suffix = Path(out).suffix.lower()
    if suffix not in PICTURES:
        raise SuffixError(f"{os.fspath(out)}: must end in {one_of(PICTURES)}; got {suffix or 'no suffix'}")
    if suffix in SINGLE and summary:
        sheets = 1
    if suffix in SINGLE and sheets > 1:
        raise SuffixError(
            f"{os.fspath(out)}: a {suffix[1:].upper()} holds one picture, there are {sheets}; use .html or .pdf"
        )
    if sheets > MOST_SHEETS:
        raise ValueError(f"{os.fspath(out)}: a picture shows at most {MOST_SHEETS} proteins, there are {sheets:,}")
    check_libraries()
    return suffix


def check_libraries() -> None:
    """Check that the libraries that draw are installed.

    Raises:
        ImportError: they are not.
    """
    from importlib.util import find_spec

    missing = [name for name in ("matplotlib", "logomaker") if find_spec(name) is None]
    if missing:
        raise ImportError(f"pictures need {', '.join(missing)}: {install_hint('plot')}")


def draw(result: Any, run: RunInfo | None = None) -> Picture:
    """The picture of a result: `draw(turbo.score_variants(protein)).save("map.html")`.

    Args:
        result: what `score_variants`, `score`, `generate` or `evaluate` of `TurboEsm` returned, or the function that
            scores or generates records; a list of `GeneratedSequence`; `Binders` by the names of their targets; a
            `Calibration`.
        run: what the result was computed with, for the caption; None names what the result knows.

    Raises:
        TypeError: it is none of these.
        ValueError: there is nothing to draw.
        ImportError: matplotlib or logomaker is missing.
    """
    check_libraries()
    from esm_turbo.pictures.sheets import sheets_of

    sheets = sheets_of(result, run)
    if not sheets:
        raise ValueError(f"there is nothing to draw in {result!r}")
    return Picture(sheets)
