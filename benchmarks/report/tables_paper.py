"""The paper's tables (arXiv:2603.26110) beside ours, and what its arithmetic rests on; ours from the stored records."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import stored
from benchmarks.harness.ablation import PAPER_ABLATION, PAPER_TABLE_7
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import cosine, source, table
from esm_turbo.codecs.fitting.statistics import Array

PAPER_TABLE_1 = {
    "insulin_B_chain": 0.9603,
    "hemoglobin_alpha": 0.9639,
    "TM_helix": 0.9710,
    "polyAG": 0.9735,
    "serine_protease_fragment": 0.9641,
    "FUS_IDR": 0.9757,
}
"""Decode cosine similarity, ESM-2 650M."""
PAPER_TABLE_4 = {"FP32": 330.0, "total": 46.6}
"""MB of a cache of 1,024 tokens, ESM-2 650M."""

_MIB = 2**20
_SHOWN = ("paper", "turbo4", "turbo3", "turbo2", "turbo1")


def ablation() -> str:
    """The paper's table 7 beside ours."""
    rows = []
    for name in PAPER_ABLATION:
        preset = "paper" if name == "full" else f"paper, {name}"
        theirs = f"{PAPER_TABLE_7[name]:.3f}" if name in PAPER_TABLE_7 else ""
        cells = [name, theirs]
        for proteins in ("cath_val200", "paper_six"):
            record = stored.accuracy(proteins, preset)["figures"]["preset"]
            cells.append(cosine(record["leave_one_out"]["against_frozen"]["residues"]))
        cells.append(f"{record['memory']['bits_per_element']:.2f}")
        rows.append(cells)
    head = [
        "configuration",
        "paper: ESM-2 650M, haemoglobin alpha",
        "ours: esm2-mini, domains",
        "ours: esm2-mini, the paper's six proteins",
        "bits",
    ]
    return table(head, rows) + source(stored.accuracy("cath_val200", "paper, no sign"), "accuracy")


def paper_table_1() -> str:
    """Tables 1 and 2: the paper's six proteins. Prefill, and decoding."""
    records = stored.newest("paper_six", lambda figures: figures["protein"])
    rows = []
    for name, theirs in PAPER_TABLE_1.items():
        figures = records[name]["figures"]
        [frozen] = [e for e in figures["frozen"]["extend"] if e["refreshed"] == 0]
        rows.append(
            [
                f"{figures['description']} ({figures['residues']})",
                f"{theirs:.4f}",
                f"{figures['prefill']['cosine_mean']:.6f}",
                *(cosine(_loo(figures, preset)) for preset in ("paper", "turbo3", "turbo1")),
                f"{frozen['against_full']['residues']['cosine_mean']:.4f}",
            ]
        )
    head = [
        "protein (residues)",
        "paper: decode",
        "ours: prefill",
        "`paper` against frozen (1 %)",
        "`turbo3`",
        "`turbo1`",
        "frozen against full, last residue new",
    ]
    return table(head, rows) + source(next(reversed(records.values())), "paper_six")


def paper_table_4() -> str:
    """Table 4: bytes at the geometry of ESM-2 650M."""
    sizes = _sizes()["650M"]["figures"]["presets"]
    rows = [
        ["float32", f"{PAPER_TABLE_4['FP32']:.1f}", *_size_cells(sizes["fp32"])],
        ["fp16", "", *_size_cells(sizes["fp16"])],
        ["`paper`", f"{PAPER_TABLE_4['total']:.1f}", *_size_cells(sizes["paper"])],
        *([f"`{name}`", "", *_size_cells(sizes[name])] for name in _SHOWN[1:]),
    ]
    head = ["stored as", "paper: MB", "ours: MiB", "bits per element", "vs float32", "vs fp16"]
    return table(head, rows) + _SIZES_SOURCE


def memory_by_geometry() -> str:
    """Bytes at all published geometries."""
    rows = []
    for name, record in _sizes().items():
        figures = record["figures"]["presets"]
        rows.append(
            [f"{name}: {_geometry(record)}", *(_mib(figures[preset]["bytes"]) for preset in ("fp32", "fp16", *_SHOWN))]
        )
    head = ["MiB; layers x heads x head_dim", "float32", "fp16", *(f"`{name}`" for name in _SHOWN)]
    return table(head, rows) + _SIZES_SOURCE


def coding_gains() -> str:
    """Bits an element that sharing out by variance or cost saves against equal bits, at high rates."""
    record = newest_calibration()
    shown = {
        "variance, channels": "variance of the channels",
        "variance, svd": "variance after the SVD",
        "cost, svd": "cost after the SVD",
        "cost, turbo": "cost in the turbo basis",
    }
    rows = []
    for kind, spectra in record["figures"]["spectra"].items():
        gains = [coding_gain(np.array(spectra[name])) for name in shown]
        # The values of the first layer have as many dimensions as there are residues, which makes any gain.
        rows.append([f"{kind}s", *(f"{np.median(gain):.2f}" for gain in gains)])
    return table(["bits, median over heads", *shown.values()], rows) + source(record, "calibration")


def coding_gain(spectra: Array) -> Array:
    """Half the base-2 logarithm of the arithmetic over the geometric mean, of spectra [..., components]."""
    logs = np.log2(np.maximum(spectra, np.finfo(np.float32).tiny))
    return np.asarray(0.5 * (np.log2(spectra.mean(axis=-1)) - logs.mean(axis=-1)))


def newest_calibration() -> Record:
    """What the shipped calibration holds."""
    [record] = stored.newest("calibration", lambda figures: "shipped").values()
    return record


def _loo(figures: dict[str, Any], preset: str) -> dict[str, float]:
    found: dict[str, float] = figures["presets"][preset]["leave_one_out"]["against_frozen"]["residues"]
    return found


def _sizes() -> dict[Any, Record]:
    return stored.newest("memory", lambda figures: figures["size"])


def _size_cells(size: dict[str, float]) -> list[str]:
    ratio = size["ratio_to_fp32"]
    return [_mib(size["bytes"]), f"{size['bits_per_element']:.2f}", f"{ratio:.2f}x", f"{ratio / 2:.2f}x"]


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:,.1f}"


def _geometry(record: Record) -> str:
    shape = record["figures"]["shape"]
    return f"{shape['num_layers']} x {shape['num_heads']} x {shape['head_dim']}"


_SIZES_SOURCE = (
    "Size of a cache of 1,024 tokens with everything stored for it. It follows from the geometry alone; no weights are"
    " needed. `benchmarks/results/memory.jsonl`.\n"
)

TABLES = {
    function.__name__: function
    for function in (
        ablation, paper_table_1, paper_table_4, memory_by_geometry, coding_gains
    )
}  # fmt: skip
