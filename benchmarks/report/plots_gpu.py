"""Images of what was measured on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from benchmarks.harness import stored
from benchmarks.harness.names import COMPRESSED, SDPA, SDPA_FLOAT32
from benchmarks.report.tables_gpu import FILE

_QUERIES = 1
_ARMS = {SDPA_FLOAT32: "s:", SDPA: "s-", **dict.fromkeys(COMPRESSED, "o-")}


def decode_attention() -> Figure:
    """Time of decode attention against the length of the context, one query, by preset and batch."""
    found = stored.newest(
        "speed", lambda f: f["case"] if f["benchmark"] == "decode_attention_cuda" else None, FILE
    ).values()
    rows = [record["figures"] for record in found if record["figures"]["shape"]["queries"] == _QUERIES]
    batches = sorted({row["shape"]["batch_size"] for row in rows})
    if not batches:
        raise LookupError("no decode attention of that many queries")
    figure = Figure(figsize=(2.9 * len(batches), 4.6))
    axes = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axis, batch_size in zip(axes, batches, strict=True):
        own = sorted(
            (row for row in rows if row["shape"]["batch_size"] == batch_size),
            key=lambda row: int(row["shape"]["context_tokens"]),
        )
        for arm, style in _ARMS.items():
            there = [row for row in own if arm in row["seconds"]]
            tokens = [row["shape"]["context_tokens"] for row in there]
            axis.plot(tokens, [1e6 * row["seconds"][arm]["p50"] for row in there], style, markersize=4, label=arm)
        axis.set(xscale="log", yscale="log", xlabel="context length (tokens)")
        axis.set_title(f"batch of {batch_size}")
        tokens = [row["shape"]["context_tokens"] for row in own]
        axis.set_xticks(tokens, [f"{n:,}" for n in tokens])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time (µs)")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


PLOTS: dict[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {"decode_attention": (decode_attention, (FILE,))}
