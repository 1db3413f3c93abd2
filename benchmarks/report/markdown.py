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


def accuracy(figures: Mapping[str, float]) -> list[str]:
    """Cells of the two columns of `accuracy_head`."""
    return [cosine(figures), small(figures["kl_mean"])]


def accuracy_head(*titles: str) -> list[str]:
    """Titles of two columns each: cosine and mean KL divergence."""
    return [column for title in titles for column in (f"{title}: cosine (1 %)", "KL")]


def small(x: float) -> str:
    """Two digits, as a decimal fraction down to a millionth."""
    if x < 1e-6:
        return "0" if x == 0 else f"{x:.0e}"
    return f"{x:.{max(0, 1 - math.floor(math.log10(x)))}f}"


def made_by(record: Record, *others: Record, packages: Sequence[str] = ("torch", "transformers")) -> str:
    """Versions of packages at a record, and its commit and those of others, in words."""
    versions = record["environment"]["versions"]
    commits = dict.fromkeys(
        one["revision"]["commit"][:10] + " with local changes" * one["revision"]["dirty"] for one in (record, *others)
    )
    commit = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    return ", ".join([*(f"{name} {versions[name]}" for name in packages), commit])


def source(record: Record, file: str, model: str = "esm2-mini", others: Sequence[Record] = ()) -> str:
    """The source of the figures of a table: one of its records, the file, the model in words, and other records."""
    runs: dict[tuple[str, ...], list[Record]] = {}
    for one in (record, *others):
        where, versions = one["environment"], one["environment"]["versions"]
        runs.setdefault((where["processor"], versions["torch"], versions["transformers"]), []).append(one)
    said = " and ".join(f"on a CPU ({processor}), {made_by(*alike)}" for (processor, *_), alike in runs.items())
    return f"Measured with {model} in float32 {said}; `benchmarks/results/{file}.jsonl`.\n"
