"""The service under load on this machine, and what it must withstand; --save appends a row to results/serve.jsonl.

    python -m benchmarks.serve --save
    python -m benchmarks.serve --device cuda --dtype bfloat16 --save

The service runs in a process of its own, its clients in this one, over the loopback device. What the library does alone
is measured in turns with the load, in this process. Steps:

    load: clients that always wait for an answer, on many contexts; every answer is compared with the library's
    quarter: requests that come at random times, at a quarter of the rate that the load reached
    malformed: requests that are none, or wrong
    kill: SIGKILL in the middle of a load, and a restart on the same store

Exit code: 0 all targets met, 1 one missed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import records
from benchmarks.serve.load import Load, Outcome
from benchmarks.serve.malformed import malformed, status_of
from benchmarks.serve.process import Process
from benchmarks.serve.workload import Ask, Library, asks, proteins
from esm_turbo import TurboEsm

# Largest difference of a value from the library's; half precision rounds at about 0.01, and sums many of them.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.2}
THROUGHPUT, LATENCY = 0.8, 4.0
# Growth of the service's memory in bytes that counts as flat.
FLAT = 32 << 20
_TURNS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps; the exit code."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    turbo = TurboEsm.from_pretrained(options.model, device=options.device, dtype=options.dtype)
    with tempfile.TemporaryDirectory(prefix="esm-turbo-benchmark-") as folder:
        figures = run(turbo, options, Path(folder))
    missed = [name for name, target in figures["targets"].items() if not target["met"]]
    for name, target in figures["targets"].items():
        print(f"{name}: {target}")
    if options.save:
        figures["command"] = (
            f"python -m benchmarks.serve {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
        )
        records.append(records.RESULTS / "serve.jsonl", "serve", figures, model=turbo.name, device=options.device)
    return 1 if missed else 0


def run(turbo: TurboEsm, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All steps; the figures, targets among them."""
    targets = proteins(options.contexts, options.seed, 60, options.longest)
    work = asks(targets, options.requests, options.seed + 1, turbo.name)
    library = Library(turbo, targets)
    expected = [library.values(ask) for ask in work]
    # Clients that wait for each other for longer than the default would be told to come again, rightly.
    command = ["--store", folder / "store", "--device", options.device, "--threads", options.threads, "--timeout", 900]
    command += [] if options.model is None else ["--model", options.model]
    command += [] if options.dtype is None else ["--dtype", options.dtype]
    figures: dict[str, Any] = {
        "clients": options.clients, "contexts": options.contexts, "requests": len(work), "threads": options.threads,
        "residues": [min(map(len, targets)), max(map(len, targets))], "seed": options.seed,
        "dtype": str(turbo.model.dtype).removeprefix("torch."), "load_average": os.getloadavg()[0],
    }  # fmt: skip
    with Process(*map(str, command)) as service:
        load = Load(work, expected, [service.client().add(target) for target in targets])
        # Everything has run once, in the service as in the library.
        load.busy(service.port, options.clients, _seconds(library, work[:10]) * len(work) / 10)
        figures["load"] = _load(service, library, load, options)
        figures["quarter"] = _quarter(service, load, figures["load"]["requests_per_second"] / 4, options)
        figures["malformed"] = _malformed(service, load.keys[0], options)
        figures["kill"] = _kill(service, command, load, targets, options)
    figures["targets"] = _targets(figures)
    return figures


def _seconds(library: Library, work: Sequence[Ask]) -> float:
    begin = time.perf_counter()
    for ask in work:
        library.values(ask)
    return time.perf_counter() - begin


def _load(service: Process, library: Library, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """The load in turns with the library, so that both have the same machine."""
    outcomes, alone, each = [], 0.0, max(1, len(load.asks) // _TURNS)
    for turn in range(_TURNS):
        alone += _seconds(library, load.asks[turn * each : (turn + 1) * each])
        outcomes.append(load.busy(service.port, options.clients, options.seconds / _TURNS))
    rate = sum(one.count for one in outcomes) / sum(one.elapsed for one in outcomes)
    own = _TURNS * each / alone
    errors = [error for one in outcomes for error in one.errors]
    return {
        "seconds": sum(one.elapsed for one in outcomes),
        "answers": sum(one.count for one in outcomes),
        "errors": len(errors),
        "first_errors": errors[:3],
        "worst_difference": max(one.worst for one in outcomes),
        "other_residues": sum(one.other_residues for one in outcomes),
        "requests_per_second": rate,
        "library_requests_per_second": own,
        "ratio": rate / own,
        "latency": _latencies(outcomes),
    }


def _latencies(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    kinds = sorted({kind for one in outcomes for kind in one.seconds})
    found = {}
    for kind in kinds:
        seconds = [value for one in outcomes for value in one.seconds.get(kind, ())]
        p50, p95, p99 = np.percentile(seconds, [50, 95, 99]).tolist()
        found[kind] = {"count": len(seconds), "p50": p50, "p95": p95, "p99": p99}
    return found


def _quarter(service: Process, load: Load, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Time of one request alone, before and after, and of requests at this rate."""
    alone = [load.busy(service.port, 1, options.seconds / 8)]
    outcome = load.steady(service.port, rate, options.seconds / 2, options.seed)
    alone.append(load.busy(service.port, 1, options.seconds / 8))
    seconds = [value for own in outcome.seconds.values() for value in own]
    one = [value for own in alone for values in own.seconds.values() for value in values]
    p95 = float(np.percentile(seconds, 95))
    return {
        "requests_per_second": rate,
        "answers": outcome.count,
        "errors": len(outcome.errors) + sum(len(own.errors) for own in alone),
        "worst_difference": outcome.worst,
        "alone": {"mean": statistics.fmean(one), "p95": float(np.percentile(one, 95)), "kinds": _latencies(alone)},
        "p95": p95,
        "kinds": _latencies([outcome]),
        "ratio": p95 / statistics.fmean(one),
    }


def _malformed(service: Process, key: str, options: argparse.Namespace) -> dict[str, Any]:
    raw = list(malformed(options.malformed, key, options.seed))
    warm = max(1, len(raw) // 5)
    statuses = [status_of(service.port, one) for one in raw[:warm]]
    before = service.resident_bytes
    statuses += [status_of(service.port, one) for one in raw[warm:]]
    counts = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    return {
        "requests": len(raw),
        "statuses": counts,
        "not_4xx": sum(not 400 <= status < 500 for status in statuses),
        "traceback": "Traceback" in service.said,
        "said": service.said[:500],
        "grown_bytes": service.resident_bytes - before,
        "healthy": service.client().get("/healthz").status == 200,
    }


def _kill(
    service: Process, command: Sequence[object], load: Load, targets: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Kill the service while it answers and stores, start it again, and ask for everything that it had confirmed."""
    more = proteins(options.contexts, options.seed + 2, 60, options.longest)
    confirmed: dict[str, str] = dict(zip(load.keys, targets, strict=True))

    def add() -> None:
        client = service.client()
        try:
            for protein in more:
                confirmed[client.add(protein)] = protein
        except OSError:
            return

    loading = partial(load.busy, service.port, options.clients, options.seconds / 16)
    threads = [threading.Thread(target=job) for job in (add, loading)]
    for thread in threads:
        thread.start()
    time.sleep(options.seconds / 32)
    service.end(signal.SIGKILL)
    for thread in threads:
        thread.join()
    with Process(*map(str, command)) as again:
        client, lost = again.client(), 0
        for key, protein in confirmed.items():
            answer = client.get(f"/v1/contexts/{key}")
            lost += answer.status != 200 or answer.json["residues"] != len(protein)
        after = load.busy(again.port, options.clients, options.seconds / 16)
        said, code = again.said, again.end(signal.SIGTERM)
    return {
        "confirmed": len(confirmed),
        "confirmed_in_the_last_load": len(confirmed) - len(load.keys),
        "lost": lost,
        "damaged": said.count("it is computed again"),
        "answers": after.count,
        "errors": len(after.errors),
        "worst_difference": after.worst,
        "exit_code": code,
    }


def _targets(figures: dict[str, Any]) -> dict[str, Any]:
    load, quarter, wrong, kill = (figures[name] for name in ("load", "quarter", "malformed", "kill"))
    answered = (load, quarter, kill)
    at_most = {
        "errors": (sum(one["errors"] for one in answered), 0),
        "difference from the library": (max(one["worst_difference"] for one in answered), TOLERANCE[figures["dtype"]]),
        "p95 at a quarter of the load / one request alone": (quarter["ratio"], LATENCY),
        "malformed requests without 4xx": (wrong["not_4xx"], 0),
        "tracebacks": (int(wrong["traceback"]), 0),
        "growth of memory, bytes": (wrong["grown_bytes"], FLAT),
        "contexts lost or damaged by a kill": (kill["lost"] + kill["damaged"], 0),
        "exit code after SIGTERM": (kill["exit_code"], 0),
    }
    judged = {name: {"found": found, "at_most": most, "met": found <= most} for name, (found, most) in at_most.items()}
    rate = {"found": load["ratio"], "at_least": THROUGHPUT, "met": load["ratio"] >= THROUGHPUT}
    return judged | {"throughput / the library's": rate}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--contexts", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400, help="different ones")
    parser.add_argument("--seconds", type=float, default=120, help="of the load")
    parser.add_argument("--malformed", type=int, default=1000, help="number of requests")
    parser.add_argument("--longest", type=int, default=300, help="residues of the longest protein")
    parser.add_argument("--model", help="as of esm-turbo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
