"""Tables about what presets are calibrated on, made from the stored records."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import cosine, small, source, table
from esm_turbo.config import PRODUCT_PRESETS

_SETS = {"cath_val200": "domains", "long_human": "long proteins"}


def calibration_size() -> str:
    """KL by the number of proteins calibrated on: mean over the draws, and their range."""
    found = sizes()
    presets = [name for name in PRODUCT_PRESETS if any(name in row for row in found.values())]
    numbers = sorted({number for number, _ in found})
    rows = []
    for number in numbers:
        draws = max(len(kls) for (n, _), row in found.items() if n == number for kls in row.values())
        cells = [str(number), str(draws)]
        for proteins in _SETS:
            cells += [_mean_and_range(found[number, proteins][preset]) for preset in presets]
        rows.append(cells)
    head = ["proteins", "draws", *(f"{what}: `{preset}`" for what in _SETS.values() for preset in presets)]
    return table(head, rows) + source(next(reversed(_size_records().values())), "calibration_size")


def sizes() -> dict[tuple[int, str], dict[str, list[float]]]:
    """KL of every draw by number of proteins, protein set and preset."""
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for (number, _, proteins), record in _size_records().items():
        row = found.setdefault((number, proteins.removesuffix(".fasta")), {})
        for preset, figures in record["figures"]["presets"].items():
            row.setdefault(preset, []).append(figures["kl_mean"])
    return found


def class_shift() -> str:
    """Calibrated on one class, measured on another."""
    return _shift("class")


def source_shift() -> str:
    """The same by source."""
    return _shift("source")


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


def _shift(grouping: str) -> str:
    """One block of rows a preset; a cell is the mean KL."""
    records = _shift_records(grouping)
    some = next(iter(records.values()))["figures"]["presets"]
    groups = list(next(iter(some.values())))
    rows = []
    for preset in some:
        for calibrated_on, row in shift(grouping, preset).items():
            rows.append([f"`{preset}`", _plain(calibrated_on), *(small(row[group]["kl_mean"]) for group in groups)])
    head = ["preset", "calibrated on", *(_plain(group) for group in groups)]
    return table(head, rows) + source(next(reversed(records.values())), "class_shift")


def _plain(group: str) -> str:
    return group.replace("UniProtKB/Swiss-Prot (", "").replace("RefSeq (", "").rstrip(")").replace("_", " ")


def _mean_and_range(kls: list[float]) -> str:
    mean = small(statistics.mean(kls))
    return mean if len(kls) == 1 else f"{mean} ({small(min(kls))} to {small(max(kls))})"


def _size_records() -> dict[Any, Record]:
    return stored.newest(
        "calibration_size", lambda figures: (figures["calibration_proteins"], figures["draw"], figures["proteins"])
    )


def _shift_records(grouping: str) -> dict[Any, Record]:
    return stored.newest(
        "class_shift", lambda figures: figures["calibrated_on"] if figures["grouping"] == grouping else None
    )


TABLES = {function.__name__: function for function in (calibration_size, class_shift, source_shift, alpha_to_beta)}
