"""Tables of several devices: their speed beside one, and runs whose processes were killed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.harness import stored
from benchmarks.report.markdown import made_by, source, table

_TASKS = ("embed", "score", "store")
_KILLED = {
    "workers": "`--workers`: a worker",
    "driver": "`--workers`: the process that started them",
    "shards": "`--shard`: a shard",
    "ray actors": "`--engine ray`: an actor",
    "ray driver": "`--engine ray`: the process that started the run",
}


def devices() -> str:
    """Several devices against one, the newest run on each kind and number."""
    found = stored.newest("devices", lambda figures: (*figures["devices"], figures["dtype"], _model(figures)))
    rows, sources = [], []
    for record in found.values():
        figures, where = record["figures"], record["environment"]
        [(kind, count)] = Counter(name.partition(":")[0] for name in figures["devices"]).items()
        what = f"{count} workers on {where['cores']} cores" if kind == "cpu" else f"{count} x {where['device_name']}"
        seconds = figures["seconds"]
        counts = figures["proteins"]
        cells = [
            f"{figures['speedup'][task]:.2f}x ({counts[task]:,} proteins, {seconds[task][0]:.1f} s)" for task in _TASKS
        ]
        rows.append([what, _model(figures), figures["dtype"], *cells])
        sources.append(f"{what}: {made_by(record)}")
    head = ["devices", "model", "dtype", *(f"`{task}` (one device)" for task in _TASKS)]
    return table(head, rows) + f"{'; '.join(sources)}; `benchmarks/results/devices.jsonl`.\n"


def kills() -> str:
    """Killed processes by engine, over the runs that met each last."""
    totals: dict[str, Counter[str]] = {}
    tasks: dict[str, set[str]] = {}
    every = stored.newest("kills", lambda figures: (figures["seed"], *figures["by_engine"]))
    for record in every.values():
        for engine, by_task in record["figures"]["by_engine"].items():
            for task, counts in by_task.items():
                tasks.setdefault(engine, set()).add(task.partition(" ")[0])
                kept = {name: counts[name] for name in ("trials", "kills", "findings")}
                totals.setdefault(engine, Counter()).update(kept)
    rows = [
        [words, ", ".join(f"`{task}`" for task in sorted(tasks[engine])), *_counts(totals[engine])]
        for engine, words in _KILLED.items()
        if engine in totals
    ]
    rows.append(["all", "", *_counts(sum(totals.values(), Counter()))])
    newest = list(every.values())[-1]
    said = "; ".join(f"`{record['figures']['command']}`" for record in every.values())
    return table(["killed", "tasks", "runs", "kills", "findings"], rows) + f"{said}. " + source(newest, "kills")


def _counts(counts: Counter[str]) -> list[str]:
    return [f"{int(counts[name]):,}" for name in ("trials", "kills", "findings")]


def _model(figures: dict[str, Any]) -> str:
    geometry = figures["geometry"]
    if geometry is None:
        return "esm2-mini"
    layers, hidden_size, heads = geometry
    return f"random weights, {layers} layers of {hidden_size:,} in {heads} heads"


TABLES = {"devices": devices, "kills": kills}
