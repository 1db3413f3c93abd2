"""Tables of the newest attack of an hour of processors or more, and of runs whose processes were killed."""

from __future__ import annotations

from collections import Counter

from benchmarks.harness import stored
from benchmarks.report.markdown import source, table

# Kinds of trials, see benchmarks/attack/__main__.py.
_TRIED = {
    "kills": "a command killed at one of its operations on files, and run again",
    "text": "FASTA, CSV and other text damaged",
    "calibrations": "a calibration damaged",
    "models": "a file of a checkpoint damaged",
    "results": "finished results damaged or exchanged, and the command run again",
    "saved": "a saved cache damaged",
    "stores": "a file of a store damaged",
    "disks": "a disk that is full or read-only from some moment on, or limits file sizes",
    "memory": "less memory than a long protein needs",
    "processes": "several processes that write to one place",
    "threads": "several threads that use one model and one store",
    "caches": "random operations on a cache, compared with a model in float64",
    "identity": "weights, options, code, hooks or adapters changed between making contexts and using them, or back",
    "homologs": "contexts of homologs of E1 damaged, or their model changed",
    "nonsense": "bodies without sense sent to a service, while another client asks",
    "leaving": "clients that leave a service in the middle of large requests, likewise",
    "stalling": "clients that stall or do not read, likewise",
    "starving": "a client that takes all it can get, likewise",
    "stopped": "SIGTERM to a service while requests run",
}
_HOUR = 3600
_KILLED = {
    "workers": "`--workers`: a worker",
    "driver": "`--workers`: the process that started them",
    "shards": "`--shard`: a shard",
    "ray actors": "`--engine ray`: an actor",
    "ray driver": "`--engine ray`: the process that started the run",
}


def attack() -> str:
    """Trials and findings by kind."""
    runs = stored.newest(
        "attack", lambda figures: "attack" if figures["seconds"] * figures["workers"] >= _HOUR else None
    )
    [record] = runs.values()
    figures = record["figures"]
    rows = [
        [tried, f"{figures['trials'].get(kind, 0):,}", f"{sum(figures['findings'].get(kind, {}).values()):,}"]
        for kind, tried in _TRIED.items()
    ]
    rows.append(["all", f"{figures['trials_total']:,}", f"{figures['findings_total']:,}"])
    said = (
        f"`make attack SECONDS={figures['seconds']:.0f} SEED={figures['seed']} JOBS={figures['workers']}` on"
        f" {record['environment']['cores']} cores. "
    )
    return table(["trial", "times", "findings"], rows) + said + source(record, "attack")


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
    *others, newest = every.values()
    said = f"{len(every)} campaigns of `python -m benchmarks.attack.campaign`, whose options are in the file. "
    return table(["killed", "tasks", "runs", "kills", "findings"], rows) + said + source(newest, "kills", others=others)


def _counts(counts: Counter[str]) -> list[str]:
    return [f"{int(counts[name]):,}" for name in ("trials", "kills", "findings")]


TABLES = {"attack": attack, "kills": kills}
