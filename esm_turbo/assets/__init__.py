"""Files shipped with the package: the embedded model, its calibration, and proteins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]

SHIPPED = "shipped"
"""The name of the shipped proteins on the command line."""

EMBEDDED_MODEL = _PACKAGE / "assets" / "esm2-mini"

# Its name is none of a package, for which setuptools would take it.
PAGE = _PACKAGE / "assets" / "picture-page"
"""Style and script of the web pages that show results."""


def calibration_proteins() -> Path:
    """FASTA file of the shipped calibration proteins."""
    return _data("proteins.fasta")


def calibration_families() -> Path:
    """FASTA file of the shipped families of homologs, for models with exact contexts."""
    return _data("families.fasta")


def evaluation_families() -> Path:
    """FASTA file of the families for evaluation, which share no three 10-mers with those for calibration."""
    return _data("evaluation/homolog_families.fasta")


def evaluation_proteins() -> Path:
    """FASTA file of the shipped evaluation set: 200 CATH domains, disjoint from the calibration proteins."""
    return _data("evaluation/cath_val200.fasta")


def named_proteins(path: Path, shipped: Callable[[], Path]) -> Path:
    """The path of a FASTA file, or of the shipped one in place of the name `shipped`."""
    return shipped() if str(path) == SHIPPED and not path.exists() else path


def _data(name: str) -> Path:
    # A wheel holds the folder inside the package, a checkout beside it.
    for folder in (_PACKAGE / "calibration_data", _PACKAGE.parent / "calibration_data"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"calibration_data/{name} is missing from this installation of esm_turbo")
