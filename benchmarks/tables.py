"""Writes the tables of README.md and docs/ from the files in benchmarks/results/.

    python -m benchmarks.tables [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`; everything in between is replaced. `--check` writes
nothing and exits 1 where a file is not what the results say.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.evaluate import PAPER_ABLATION, PAPER_TABLE_7

ROOT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "docs/accuracy.md")
_MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COMPRESSED = [name for name in PRODUCT_PRESETS if name != "exact"]
Record = dict[str, Any]


def accuracy(proteins: str, preset: str, part: str) -> Record:
    """The newest record of a preset on a protein set that has a part: `leave_one_out`, `extend` or `outliers`."""
    for record in reversed(records.read(records.RESULTS / "accuracy.jsonl", "accuracy")):
        figures = record["figures"]
        found = figures["preset"]
        if (figures["proteins"], found["name"]) != (f"{proteins}.fasta", preset) or not found[part]:
            continue
        # Outliers are planted in a run of their own, over a part of the proteins.
        if part == "outliers" or not found["outliers"]:
            return record
    raise LookupError(f"no record of {preset} on {proteins} with {part}")


def overview() -> str:
    """Presets: memory, and leave-one-out accuracy on domains and on long proteins."""
    rows = []
    for name in _COMPRESSED:
        domains = accuracy("cath_val200", name, "leave_one_out")["figures"]["preset"]
        longs = accuracy("long_human", name, "leave_one_out")["figures"]["preset"]
        memory = domains["memory"]
        cells = [f"`{name}`", f"{memory['bits_per_element']:.2f}", f"{memory['ratio_to_fp16']:.1f}x"]
        for preset in (domains, longs):
            figures = preset["leave_one_out"]["against_frozen"]["residues"]
            cells += [_cosine(figures), f"{figures['kl_mean']:.5f}"]
        rows.append(cells)
    head = ["preset", "bits", "vs fp16", "domains: cosine (1 %)", "KL", "600 to 1,022 residues: cosine (1 %)", "KL"]
    return _table(head, rows) + _source(accuracy("cath_val200", "turbo3", "leave_one_out"))


def freezing() -> str:
    """Extension by eight residues: what freezing costs and what compressing costs, by residues refreshed."""
    rows = []
    frozen = accuracy("cath_val200", "turbo3", "extend")["figures"]["frozen"]["extend"]
    for new in (1, 8, 32):
        arms = {"frozen against full": [(e, "against_full") for e in frozen]}
        for name in ("turbo3", "turbo2"):
            extend = accuracy("cath_val200", name, "extend")["figures"]["preset"]["extend"]
            arms[f"`{name}` against frozen"] = [(e, "against_frozen") for e in extend]
        for arm, entries in arms.items():
            chosen = [(e, side) for e, side in entries if e["new_residues"] == new]
            rows.append([str(new), arm, *(_cosine(e[side]["residues"]) for e, side in chosen)])
    return _table(["new residues", "cosine (1 %)", "0 refreshed", "8 refreshed", "32 refreshed"], rows) + _source(
        accuracy("cath_val200", "turbo3", "extend")
    )


def ablation() -> str:
    """The paper's table 7 beside ours."""
    rows = []
    for name in PAPER_ABLATION:
        preset = "paper" if name == "full" else f"paper, {name}"
        theirs = f"{PAPER_TABLE_7[name]:.3f}" if name in PAPER_TABLE_7 else ""
        cells = [name, theirs]
        for proteins in ("cath_val200", "paper_six"):
            record = accuracy(proteins, preset, "leave_one_out")["figures"]["preset"]
            cells.append(_cosine(record["leave_one_out"]["against_frozen"]["residues"]))
        cells.append(f"{record['memory']['bits_per_element']:.2f}")
        rows.append(cells)
    head = [
        "configuration",
        "paper: ESM-2 650M, haemoglobin alpha",
        "here: esm2-mini, 200 domains",
        "esm2-mini, the paper's six proteins",
        "bits",
    ]
    return _table(head, rows) + _source(accuracy("cath_val200", "paper, no sign", "leave_one_out"))


def positions() -> str:
    """Long proteins by position."""
    rows = []
    for name in _COMPRESSED:
        record = accuracy("long_human", name, "leave_one_out")
        thirds = record["figures"]["preset"]["leave_one_out"]["by_position"]
        rows.append([f"`{name}`", *(_cosine(thirds[third]) for third in ("1-300", "301-600", "over 600"))])
    return _table(["cosine (1 %)", "residues 1-300", "301-600", "over 600"], rows) + _source(record)


def outliers() -> str:
    """Outliers planted without changing the function."""
    rows, scales = [], []
    for name in _COMPRESSED:
        record = accuracy("cath_val200", name, "outliers")
        planted = record["figures"]["preset"]["outliers"]
        scales = [f"x{entry['scale']}" for entry in planted]
        rows.append([f"`{name}`", *(_cosine(entry["against_frozen"]["residues"]) for entry in planted)])
    return _table(["cosine (1 %)", *scales], rows) + _source(record)


TABLES: dict[str, Callable[[], str]] = {
    "overview": overview,
    "freezing": freezing,
    "ablation": ablation,
    "positions": positions,
    "outliers": outliers,
}


def render(text: str) -> str:
    """The text with every marked table replaced."""
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = render(text)
        if new != text:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"not what benchmarks/results says: {', '.join(stale)}; run python -m benchmarks.tables", file=sys.stderr)
    return int(check and bool(stale))


def _cosine(figures: dict[str, float]) -> str:
    return f"{figures['cosine_mean']:.5f} ({figures['cosine_q01']:.4f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n\n"


def _source(record: Record) -> str:
    """Where the figures of a table come from."""
    where, versions = record["environment"], record["environment"]["versions"]
    return (
        f"Measured on the embedded model {record['model']} (9.6 M parameters, not one of Meta's), float32, on the CPU,"
        f" {where['processor']}, torch {versions['torch']}, transformers {versions['transformers']},"
        f" commit {record['revision']['commit'][:10]}; `benchmarks/results/accuracy.jsonl`.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
