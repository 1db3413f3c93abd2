"""Table of the newest attack of an hour or more: what was tried, how often, and what was found."""

from __future__ import annotations

from benchmarks.harness import stored
from benchmarks.report.markdown import source, table

# Kinds of trials, see benchmarks/attack/__main__.py, and former ones that are now part of `identity`.
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
    "weights": "weights changed between two calls",
    "folders": "weights changed between two runs into one folder",
    "nonsense": "bodies without sense sent to a service, while another client asks",
    "leaving": "clients that leave a service in the middle of large requests, likewise",
    "stalling": "clients that stall or do not read, likewise",
    "starving": "a client that takes all it can get, likewise",
    "stopped": "SIGTERM to a service while requests run",
}
_FORMER = ("weights", "folders")
_HOUR = 3600


def attack() -> str:
    """Trials and findings by kind."""
    runs = stored.newest("attack", lambda figures: "attack" if figures["seconds"] >= _HOUR else None)
    [record] = runs.values()
    figures = record["figures"]
    rows = [
        [tried, f"{figures['trials'].get(kind, 0):,}", f"{sum(figures['findings'].get(kind, {}).values()):,}"]
        for kind, tried in _TRIED.items()
        if kind not in _FORMER or kind in figures["trials"]
    ]
    rows.append(["all", f"{figures['trials_total']:,}", f"{figures['findings_total']:,}"])
    said = (
        f"`make attack SECONDS={figures['seconds']:.0f} SEED={figures['seed']} JOBS={figures['workers']}` on"
        f" {record['environment']['cores']} cores. "
    )
    return table(["trial", "times", "findings"], rows) + said + source(record, "attack")


TABLES = {"attack": attack}
