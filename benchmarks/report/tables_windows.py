"""Tables about long proteins window by window, made from the stored records."""

from __future__ import annotations

from benchmarks.harness import stored
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import cosine, small, source, table

_OVERLAP = 64


def windows() -> str:
    """Window by window against the full run, by window and memory."""
    found = {key: record for key, record in _windows().items() if key[1] == _OVERLAP}
    rows = []
    for window, memory in dict.fromkeys((window, memory) for window, _, memory, _ in found):
        arms = {preset: found[w, o, m, preset] for w, o, m, preset in found if (w, m) == (window, memory)}
        figures = (arms["turbo3"] if memory else arms["none"])["figures"]["against_full"]
        where = [str(window), str(memory) if memory else "none (plain windows)"]
        rows.append([*where, cosine(figures), small(figures["kl_mean"])])
    head = ["window", "memory", "`turbo3`: cosine (1 %)", "KL"]
    record = next(reversed(found.values()))
    return table(head, rows) + f"{record['figures']['tested']} proteins. " + source(record, "windows")


def long_memory() -> str:
    """Peak memory and speed by length."""
    [record] = stored.newest(
        "speed", lambda figures: figures["benchmark"] if figures["benchmark"] == "long_proteins" else None, "cpu"
    ).values()
    figures = record["figures"]
    rows = []
    for length, one in figures["bytes"].items():
        sizes = [one["loaded"], one["peak"], one["output"], figures["bytes_without_output"][length]]
        speed = f"{figures['residues_per_second'][length]:,.0f}"
        rows.append([f"{int(length):,}", *(f"{size / 2**20:,.0f}" for size in sizes), speed])
    shape = figures["shape"]
    growth = figures["growth"]["peak without the output"]
    head = [
        "residues",
        "model loaded, MiB",
        "peak, MiB",
        "result, MiB",
        "peak without the result, MiB",
        "residues/s",
    ]
    return (
        table(head, rows)
        + f"Windows of {shape['window']}, overlap {shape['overlap']}, memory {shape['memory']} as `{shape['preset']}`;"
        f" the peak without the result grows by a factor of {growth:.2f}. " + source(record, "cpu")
    )


def _windows() -> dict[tuple[int, int, int, str], Record]:
    """Records by window, overlap, memory and preset."""
    found = stored.newest("windows", lambda f: (f["window"], f["overlap"], f["memory"], f["preset"]))
    return {key: record for key, record in found.items() if isinstance(key, tuple)}


TABLES = {
    "windows": windows,
    "long_memory": long_memory,
}
