"""Files that ship with the package: the embedded model, its calibration, and proteins."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]

EMBEDDED_MODEL = _PACKAGE / "assets" / "esm2-mini"


def calibration_proteins() -> Path:
    """The FASTA file of the shipped calibration proteins."""
    return _data("proteins.fasta")


def evaluation_proteins() -> Path:
    """The FASTA file of the shipped evaluation set, 200 CATH domains disjoint from calibration."""
    return _data("evaluation/cath_val200.fasta")


def _data(name: str) -> Path:
    # A wheel carries the folder inside the package, a checkout has it beside.
    for folder in (_PACKAGE / "calibration_data", _PACKAGE.parent / "calibration_data"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"calibration_data/{name} is missing from this installation of esm_turbo")
