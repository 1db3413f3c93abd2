"""Table of the newest load on the service, by device, against its targets."""

from __future__ import annotations

from benchmarks.harness import stored
from benchmarks.report.markdown import made_by, small, table

# Targets of benchmarks/serve/__main__.py by what they are called here.
_ROWS = {
    "throughput / the library's": "requests per second, against one call of the library each",
    "p95 at a quarter of the load / one request alone": (
        "95th percentile of the times at a quarter of that rate, against the mean of one request alone"
    ),
    "difference from the library": "largest difference of a value from the library's",
    "errors": "errors among the answers",
    "malformed requests without 4xx": "malformed requests with another answer than 4xx",
    "tracebacks": "tracebacks over them",
    "growth of memory, bytes": "growth of memory over them, bytes",
    "contexts lost or damaged by a kill": "contexts lost or damaged by a kill",
    "exit code after SIGTERM": "exit code after SIGTERM",
}
_CLIENTS, _CONTEXTS = 64, 200


def serving() -> str:
    """Workload and results on each device."""
    runs = stored.newest("serve", _device)
    targets = [record["figures"]["targets"] for record in runs.values()]
    rows = [
        [
            words,
            *(_found(each[name]) for each in targets),
            ", ".join(dict.fromkeys(_asked(each[name]) for each in targets)),
        ]
        for name, words in _ROWS.items()
    ]
    devices = [f"{record['environment']['device_name']}, {record['figures']['dtype']}" for record in runs.values()]
    return table(["what", *devices, "asked"], rows) + " ".join(_source(record) for record in runs.values()) + "\n"


def _device(figures: stored.Record) -> str | None:
    """The device of a run; None with fewer clients or contexts than the targets are for."""
    words = figures["command"].split()
    if figures["clients"] < _CLIENTS or figures["contexts"] < _CONTEXTS:
        return None
    return words[words.index("--device") + 1] if "--device" in words else "cpu"


def _found(target: stored.Record) -> str:
    found = target["found"]
    words = f"{found:,}" if isinstance(found, int) else f"{found:.2f}" if found >= 1 else small(found)
    return words if target["met"] else f"**{words}**"


def _asked(target: stored.Record) -> str:
    [(bound, limit)] = ((name, limit) for name, limit in target.items() if name.startswith("at_"))
    return f"{bound.replace('_', ' ')} {limit:,}" if limit else "0"


def _source(record: stored.Record) -> str:
    figures = record["figures"]
    return (
        f"`{figures['command']}`: {record['model']}, {figures['clients']} clients on {figures['contexts']} contexts"
        f" for {figures['load']['seconds']:.0f} s, {made_by(record)}; `benchmarks/results/serve.jsonl`."
    )


TABLES = {"serving": serving}
