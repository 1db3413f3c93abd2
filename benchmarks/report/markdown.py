"""Common parts of the generated tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.harness.stored import Record


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n\n"


def cosine(figures: Mapping[str, float]) -> str:
    """Mean and quantile of 1 %."""
    return f"{figures['cosine_mean']:.5f} ({figures['cosine_q01']:.4f})"


def small(x: float) -> str:
    """Two digits, as a decimal fraction down to a millionth."""
    if x < 1e-6:
        return "0" if x == 0 else f"{x:.0e}"
    return f"{x:.{max(0, 1 - math.floor(math.log10(x)))}f}"


def made_by(record: Record) -> str:
    """Versions and commit of a record in words."""
    versions, revision = record["environment"]["versions"], record["revision"]
    changed = " with local changes" if revision["dirty"] else ""
    return (
        f"torch {versions['torch']}, transformers {versions['transformers']}, commit {revision['commit'][:10]}{changed}"
    )


def source(record: Record, file: str, model: str = "esm2-mini") -> str:
    """The source of the figures of a table: one of its records, the file, and the model in words."""
    processor = record["environment"]["processor"]
    return (
        f"Measured with {model} in float32 on a CPU ({processor}), {made_by(record)};"
        f" `benchmarks/results/{file}.jsonl`.\n"
    )
