"""Tables about embedding many and long proteins, about the store of contexts, and about where a cache does not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness import stored
from benchmarks.harness.names import EMBED, FILE_ORDER, SAME_BATCHES
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import accuracy, made_by, source, table
from esm_turbo.files.tabular import counted

_OVERLAP = 64
# Arms of the benchmark of identities.
_IDENTITY = ("a first context", "opening a store", "looking for changes in the sample, too", "extension")


def embedding_throughput() -> str:
    """Our loop beside plain ones."""
    rows, records = [], stored.speed("embedding_throughput")
    for record in records:
        figures = record["figures"]
        shape, rates, ratios = figures["shape"], figures["residues_per_second"], figures["ratios"]
        speeds = (f"{rates[arm]:,.0f}" for arm in (FILE_ORDER, SAME_BATCHES, EMBED))
        faster = 1 / ratios[f"{EMBED} / {SAME_BATCHES}"], ratios[f"{FILE_ORDER} / {EMBED}"]
        where = f"{record['model']}, {shape['dtype']}", str(shape["proteins"])
        rows.append([*where, *speeds, *(f"{ratio:.2f}x" for ratio in faster)])
    head = ["model", "proteins", "residues/s: file order, batches of 8", "same batches as ours", "`turbo.embed`",
            "speedup over the same batches", "speedup over file order"]  # fmt: skip
    return table(head, rows) + source(records[-1], "cpu")


def windows() -> str:
    """Window by window against the full run, by window and memory."""
    # Without a memory no preset is used.
    preset = {True: "turbo3", False: "none"}
    found = stored.newest(
        "windows",
        lambda f: (
            (f["window"], f["memory"]) if f["overlap"] == _OVERLAP and f["preset"] == preset[f["memory"] > 0] else None
        ),
    )
    rows = []
    for record in found.values():
        window, memory = (record["figures"][name] for name in ("window", "memory"))
        figures = record["figures"]["against_full"]
        where = [str(window), str(memory) if memory else "none (plain windows)"]
        rows.append([*where, *accuracy(figures)])
    head = ["window", "memory", "`turbo3`: cosine (1 %)", "KL"]
    return table(head, rows) + f"{record['figures']['tested']} proteins. " + source(record, "windows")


def long_memory() -> str:
    """Peak memory and speed by length."""
    [record] = stored.speed("long_proteins")
    figures = record["figures"]
    rows = []
    for length, one in figures["bytes"].items():
        bytes_of = [one["loaded"], one["peak"], one["output"], figures["bytes_without_output"][length]]
        speed = f"{figures['residues_per_second'][length]:,.0f}"
        rows.append([f"{int(length):,}", *(f"{size / 2**20:,.0f}" for size in bytes_of), speed])
    shape = figures["shape"]
    growth = figures["growth"]["peak without the output"]
    sizes = ("model loaded", "peak", "result", "peak without the result")
    head = ["residues", *(f"{size}, MiB" for size in sizes), "residues/s"]
    return (
        table(head, rows)
        + f"Windows of {shape['window']}, overlap {shape['overlap']}, memory {shape['memory']} as `{shape['preset']}`;"
        f" the peak without the result grows by a factor of {growth:.2f}. " + source(record, "cpu")
    )


def store_read() -> str:
    """A context from a store beside its prefill."""

    def cells(record: Record) -> list[str]:
        figures, seconds = record["figures"], record["figures"]["seconds"]
        times = (
            f"{1e3 * seconds[place]['p50']:.1f}" if place in seconds else ""
            for place in ("prefill", "disk", "host memory", "device memory")
        )
        return [str(figures["shape"]["residues"]), f"{figures['bytes']['cache'] / 2**20:.2f}", *times]

    head = ["residues", "MiB", "prefill, ms", "disk, ms", "host memory, ms", "device memory, ms"]
    return _on_devices("store_read", head, cells)


def identity_cost() -> str:
    """Recognising a model: once when a store is opened, and at every call."""

    def cells(record: Record) -> list[str]:
        shape, seconds = record["figures"]["shape"], record["figures"]["seconds"]
        times = (f"{1e3 * seconds[arm]['p50']:,.1f}" for arm in _IDENTITY)
        return [*times, f"{shape['new_residues']} on {shape['context_tokens'] - 1}"]

    head = ["first context, ms", "opening a store, ms", "looking for changes at a call, ms", "the call, ms", "residues"]
    return _on_devices("identity", head, cells)


def short_contexts() -> str:
    """From which length on a cache pays."""
    rows, records = [], stored.speed("short_contexts")
    for record in records:
        figures = record["figures"]
        seconds, shape, even = figures["seconds"], figures["shape"], figures["break_even_candidates"]
        rates = (f"{shape['candidates'] / seconds[arm]['p50']:,.0f}" for arm in ("full", "turbo"))
        pays = "never" if even is None else f"{even:.1f}"
        rows.append([str(shape["context_residues"]), *rates, f"{figures['ratios']['full / turbo']:.1f}x", pays])
    head = ["context residues", "candidates/s, recomputed", "candidates/s, cached", "speedup",
            "candidates to break even"]  # fmt: skip
    return table(head, rows) + source(records[-1], "cpu")


def _on_devices(benchmark: str, head: Sequence[str], cells: Callable[[Record], list[str]]) -> str:
    """A table of a benchmark on the CPU and of its twin on CUDA devices, by model and device."""
    rows, sources = [], ""
    for file, records in (("cpu", stored.speed(benchmark)), ("gpu", stored.speed(f"{benchmark}_cuda", "gpu"))):
        for record in records:
            shape = record["figures"]["shape"]
            threads = counted(record["environment"]["threads"], "thread")
            device = f"CPU, {threads}" if shape["device"] == "cpu" else shape["device_name"]
            rows.append([f"{record['model']}, {shape['dtype']}", device, *cells(record)])
        name = shape.get("device_name", record["environment"]["processor"])
        sources += f"Measured on {name}, {made_by(record)}; `benchmarks/results/{file}.jsonl`. "
    random = "Random weights are in the geometry of the published checkpoints.\n"
    return table(["model", "on", *head], rows) + sources + random


TABLES = {
    function.__name__: function
    for function in (embedding_throughput, store_read, identity_cost, short_contexts, windows, long_memory)
}
