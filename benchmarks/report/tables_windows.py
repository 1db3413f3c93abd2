"""Tables about long proteins window by window, generation and designs, made from the stored records."""

from __future__ import annotations

from math import exp
from statistics import fmean, stdev

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
        cells = [str(window), str(memory) if memory else "none (plain windows)"]
        for preset in ("exact", "turbo3"):
            one = arms.get(preset, arms.get("none"))
            assert one is not None
            figures = one["figures"]["against_full"]
            cells += [cosine(figures), small(figures["kl_mean"])]
        rows.append(cells)
    head = ["window", "memory", "`exact`: cosine (1 %)", "KL", "`turbo3`: cosine (1 %)", "KL"]
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


def generation() -> str:
    """Predictions against the full run's, by how often is refreshed."""
    found = stored.newest("generation", lambda f: (f["generated"], f["refresh"], f["refresh_every"], f["preset"]))
    rows = []
    for name, refresh, every in dict.fromkeys(key[:3] for key in found):
        if refresh not in (0, 8, 32) or every == 4:
            continue
        arms = [found[name, refresh, every, preset]["figures"] for preset in ("exact", "turbo3")]
        cells = [name, str(refresh), str(every)]
        cells.append(f"{arms[0]['tokens_a_step']:.0f} / {arms[0]['tokens_a_step_in_full']:.0f}")
        for arm in arms:
            against = arm["against_full"]
            cells += [f"{small(against['kl_mean'])} ({small(against['kl_q99'])})", f"{against['top1_agreement']:.3f}"]
        rows.append(cells)
    head = ["generated", "`refresh`", "`refresh_every`", "tokens per step / full run"]
    head += [f"{arm}: {what}" for arm in ("frozen", "`turbo3`") for what in ("KL (99 %)", "top-1 agreement")]
    return table(head, rows) + source(next(reversed(found.values())), "generation")


def designs() -> str:
    """Pseudo-perplexity of designs by arm, with the same seeds."""
    rows, last = [], None
    for (name,), record in stored.newest("designs", lambda f: (f["designs"],)).items():
        last, figures = record, record["figures"]
        for arm in ("full", "frozen", "turbo3", "turbo2", "turbo1"):
            one = figures["arms"][arm]
            perplexity = exp(fmean(one["log_pseudo_perplexity"]))
            error = stdev(one["minus_full"]) / len(one["minus_full"]) ** 0.5
            difference = "" if arm == "full" else f"{fmean(one['minus_full']):+.3f} ± {error:.3f}"
            rows.append([name, f"`{arm}`", f"{perplexity:.2f}", difference, f"{one['same_residue']:.2f}"])
    assert last is not None
    head = ["designed", "arm", "pseudo-perplexity", "its logarithm, minus that of `full`", "residues as `full` drew"]
    shape = last["figures"]["shape"]
    said = f"{shape['residues']} residues in {last['figures']['tested']} proteins, {shape['samples']} samples of each. "
    return table(head, rows) + said + source(last, "designs")


def _windows() -> dict[tuple[int, int, int, str], Record]:
    """Records by window, overlap, memory and preset."""
    found = stored.newest("windows", lambda f: (f["window"], f["overlap"], f["memory"], f["preset"]))
    return {key: record for key, record in found.items() if isinstance(key, tuple)}


TABLES = {
    "windows": windows,
    "long_memory": long_memory,
    "generation": generation,
    "designs": designs,
}
