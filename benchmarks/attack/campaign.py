"""Kills workers, shards, actors and drivers of runs over several processes, and records what was found.

    python -m benchmarks.attack.campaign [--kills N] [--seconds N] [--seed N] [--engines ENGINE ...] [--tasks TASK ...]

Engines and tasks take turns until so many processes were killed, or the time is over. A row with trials, kills and
findings of each engine and task is appended to benchmarks/results/kills.jsonl. A finding is one line with the command
that repeats its trial; which process meets which piece is up to the system, so that a trial may end otherwise.

Exit code: 0 nothing found, 1 something found. Needs Linux, and the extras `test` and `ray`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attack.commands import turbo
from benchmarks.attack.engines import ENGINES, TASKS, Cluster, run_trial
from benchmarks.harness import records

_PORT = 26399
_QUOTED = 20


def campaign(
    engines: Sequence[str],
    tasks: Sequence[str],
    seed: int,
    kills: int,
    seconds: float,
    root: Path,
    numbers: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Run trials, and print a line for each and for every finding.

    Args:
        engines: what is killed, see `engines.ENGINES`.
        tasks: see `engines.TASKS`.
        seed: of the moments.
        kills: after which no further trial begins.
        seconds: after which none begins either.
        root: folder for files.
        numbers: trials to run, whatever is killed; None counts from 0.

    Returns:
        Trials, kills and seconds by engine and task, and the findings in words.
    """
    done: dict[str, dict[str, dict[str, float]]] = {engine: {} for engine in engines}
    quoted: list[str] = []
    killed = number = 0
    cluster = None
    try:
        end = time.monotonic() + seconds
        while killed < kills and time.monotonic() < end if numbers is None else number < len(numbers):
            turn = number if numbers is None else numbers[number]
            # Every engine in turn, each with every task in turn.
            engine = engines[turn % len(engines)]
            task = tasks[turn // len(engines) % len(tasks)]
            on_ray = engine.startswith("ray")
            if on_ray and cluster is None:
                cluster = Cluster(root / "r", _PORT)
            begun = time.monotonic()
            trial = run_trial(engine, task, f"{seed} {engine} {task} {turn}", root, cluster if on_ray else None)
            took = time.monotonic() - begun
            counts = done[engine].setdefault(task, {"trials": 0, "kills": 0, "findings": 0, "seconds": 0.0})
            for name, value in (("trials", 1), ("kills", trial.kills), ("findings", len(trial.findings))):
                counts[name] += value
            counts["seconds"] += took
            killed, number = killed + trial.kills, number + 1
            print(f"{turn}: {engine}, {task}: {trial.kills} killed, {took:.1f} s; {killed} in all", flush=True)
            for one in trial.findings:
                again = shlex.join(
                    ["--engines", *engines, "--tasks", *tasks, "--seed", str(seed), "--trial", str(turn)]
                )
                what = f"{engine}, {task}: {one.category}: {' '.join(one.what.split())}"
                quoted.append(f"{what} | python -m benchmarks.attack.campaign {again}")
                print(quoted[-1], flush=True)
    finally:
        if cluster is not None:
            cluster.close()
    return {
        "by_engine": done,
        "trials": sum(int(one["trials"]) for own in done.values() for one in own.values()),
        "kills": killed,
        "findings": len(quoted),
        "quoted": quoted[:_QUOTED],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--trial", type=int, nargs="+", help="run the trials of these numbers, and record nothing")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "kills.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    turbo()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        figures = campaign(
            options.engines, options.tasks, options.seed, options.kills, options.seconds, Path(folder), options.trial
        )
    print(f"{figures['kills']} killed in {figures['trials']} trials, {figures['findings']} findings")
    if options.trial is None:
        command = shlex.join(
            ["python", "-m", "benchmarks.attack.campaign", *(sys.argv[1:] if arguments is None else arguments)]
        )
        settings = {"command": command, "seed": options.seed, "seconds": time.monotonic() - begun}
        records.append(options.out, "kills", settings | figures, model="esm2-mini")
    return 1 if figures["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
