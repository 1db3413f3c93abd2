"""Tables about what presets are calibrated on, made from the stored records."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import cosine, source, table

_SETS = {"cath_val200": "domains", "long_human": "long proteins"}


def sizes() -> dict[tuple[int, str], dict[str, list[float]]]:
    """KL of every draw by number of proteins, protein set and preset."""
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for (number, _, proteins), record in _size_records().items():
        row = found.setdefault((number, proteins.removesuffix(".fasta")), {})
        for preset, figures in record["figures"]["presets"].items():
            row.setdefault(preset, []).append(figures["kl_mean"])
    return found


def shift(grouping: str, preset: str) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by what was calibrated on and what was measured on."""
    return {
        calibrated_on: record["figures"]["presets"][preset]
        for calibrated_on, record in _shift_records(grouping).items()
    }


def alpha_to_beta() -> str:
    """What the paper says of its rotation: calibrated on alpha, measured on beta, about -0.02."""
    rows = []
    for preset in next(iter(_shift_records("class").values()))["figures"]["presets"]:
        found = shift("class", preset)
        own, other = found["mainly_beta"]["mainly_beta"], found["mainly_alpha"]["mainly_beta"]
        lost = other["cosine_mean"] - own["cosine_mean"]
        rows.append([f"`{preset}`", cosine(own), cosine(other), f"{lost:+.5f}"])
    head = ["measured on mainly beta", "calibrated on mainly beta", "calibrated on mainly alpha", "difference"]
    return table(head, rows) + source(_shift_records("class")["mainly_alpha"], "class_shift")


def _size_records() -> dict[Any, Record]:
    return stored.newest(
        "calibration_size", lambda figures: (figures["calibration_proteins"], figures["draw"], figures["proteins"])
    )


def _shift_records(grouping: str) -> dict[Any, Record]:
    return stored.newest(
        "class_shift", lambda figures: figures["calibrated_on"] if figures["grouping"] == grouping else None
    )


TABLES = {function.__name__: function for function in (alpha_to_beta,)}
