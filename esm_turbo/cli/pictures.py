"""Pictures of results, as the option `--plot` of commands asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.cli.console import say

if TYPE_CHECKING:
    from esm_turbo.proteins.fasta import ProteinRecord
    from esm_turbo.tasks.common.run_info import RunInfo


def check_plot(plot: Path | None, sheets: int = 1, *, summary: bool = False) -> None:
    """Check, before any work is done, that a picture can be drawn.

    Args:
        plot: the file; None for no picture.
        sheets: how many proteins it may show.
        summary: whether it begins with a sheet of all of them.

    Raises:
        ValueError: the file has no room for them.
        ImportError: what draws it is missing.
    """
    if plot is not None:
        from esm_turbo.pictures.picture import check_picture

        check_picture(plot, sheets, summary=summary)


def save_plot(plot: Path | None, result: Any, run: RunInfo | None = None, given: Sequence[ProteinRecord] = ()) -> None:
    """Draw a result, see `sheets_of`, and say so on standard error; not without a file, or if there is nothing in it.

    Raises:
        OSError: the file cannot be written.
    """
    if plot is None:
        return
    from esm_turbo.pictures.picture import SINGLE, Picture
    from esm_turbo.pictures.sheets import sheets_of

    if sheets := sheets_of(result, run, given):
        Picture(sheets).save(plot)
        left = len(sheets) - 1 if plot.suffix.lower() in SINGLE else 0
        alone = f": the heat map alone; .html and .pdf also show each of the {left} targets" if left else ""
        say(f"picture written to {plot}{alone}")
