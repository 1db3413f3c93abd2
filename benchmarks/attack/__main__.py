"""Attack the command line and the library for some time, and record what was found: `make attack`.

    python -m benchmarks.attack --seconds 3600 --seed 1 --workers 2
    python -m benchmarks.attack --only kills --seed 1 --trial 17

Every trial is decided by the seed, its kind and its number; the second command repeats one, as the line of a finding
says. Trials run in forks of a process that has loaded the libraries and the embedded model, on the CPU with one thread.

Kinds:
    kills: a command is killed at one of its operations on files, and run again to the end
    text, calibrations, models, results, saved (caches), stores: damaged inputs and files are refused or mended
    disks: full from some moment on, read-only, or with a limit of file sizes
    memory: too little address space for a long protein
    processes, threads: several writers at once
    caches: random sequences of cache operations against a model in float64
    identity: weights, options, code, hooks or adapters change between making contexts and using them, or back
    homologs: contexts of E1 are damaged, or of other weights
    nonsense, leaving, stalling, starving, stopped: clients of a service that send what makes no sense, leave, stall or
        take all that they can get, while another one asks; and SIGTERM while requests run

Exit code: 0 nothing found, 1 something found. Needs Linux, and the extra `test`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attack import caches, damage, homologs, identity, kills, limits, service, writers
from benchmarks.attack.commands import References, turbo
from benchmarks.attack.trial import Finding
from benchmarks.harness import records

Trial = Callable[[random.Random, Path, References], list[Finding]]
KINDS: dict[str, Trial] = {
    "kills": kills.kill,
    "text": damage.damage_text,
    "calibrations": damage.damage_calibration,
    "models": damage.damage_model,
    "results": damage.damage_results,
    "saved": damage.damage_cache,
    "stores": damage.damage_store,
    "disks": limits.disk,
    "memory": limits.memory,
    "processes": writers.processes,
    "threads": writers.threads,
    "caches": caches.sequences,
    "identity": identity.changed,
    "homologs": homologs.homologs,
    "nonsense": service.nonsense,
    "leaving": service.leaving,
    "stalling": service.stalling,
    "starving": service.starving,
    "stopped": service.stopped,
}
# Findings of one kind that a row quotes.
_QUOTED = 20


def run_trial(kind: str, seed: int, number: int, folder: Path, references: References) -> list[Finding]:
    """Run one trial.

    Args:
        kind: see `KINDS`.
        seed: of the attack.
        number: of the trial.
        folder: for its files; emptied before and after.
        references: undisturbed runs.
    """
    where = folder / f"{kind}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return KINDS[kind](random.Random(f"{seed} {kind} {number}"), where, references)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}, line {last.lineno}"
        return [Finding("trial failed", f"{type(error).__name__}: {error} ({place})")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def attack(
    kinds: Sequence[str],
    seed: int,
    seconds: float,
    references: References,
    *,
    first: int = 0,
    step: int = 1,
    most: int | None = None,
) -> list[dict[str, Any]]:
    """Run trials of all kinds, equally long each, and print a line for every finding.

    Args:
        kinds: see `KINDS`.
        seed: of the attack.
        seconds: after which no further trial begins.
        references: undisturbed runs, in a folder beside which there is room for trials.
        first: number of the first trial of each kind.
        step: between the numbers of trials of one kind.
        most: trials of each kind.

    Returns:
        One entry per trial: kind, number, seconds, findings.
    """
    spent = dict.fromkeys(kinds, 0.0)
    numbers = dict.fromkeys(kinds, first)
    done = []
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        left = [kind for kind in kinds if most is None or numbers[kind] < first + most * step]
        if not left:
            break
        kind = min(left, key=lambda kind: spent[kind])
        started = time.monotonic()
        found = run_trial(kind, seed, numbers[kind], references.root.parent / "trial", references)
        took = time.monotonic() - started
        for one in found:
            print(line(kind, seed, numbers[kind], one), flush=True)
        findings = [[one.category, one.what] for one in found]
        done.append({"kind": kind, "number": numbers[kind], "seconds": took, "findings": findings})
        # A trial that fails at once must not take the turns of the others.
        spent[kind] += max(took, 0.2)
        numbers[kind] += step
    return done


def line(kind: str, seed: int, number: int, finding: Finding) -> str:
    """A finding in one line, with the command that repeats its trial."""
    what = " ".join(finding.what.split())
    return (
        f"{kind}: {finding.category}: {what} | python -m benchmarks.attack --only {kind} --seed {seed} --trial {number}"
    )


def summary(done: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Trials and findings by kind, and the first findings in words."""
    trials: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    quoted: dict[str, list[str]] = {}
    for entry in done:
        kind = entry["kind"]
        trials[kind] += 1
        for category, what in entry["findings"]:
            found.setdefault(kind, Counter())[category] += 1
            if len(quoted.setdefault(kind, [])) < _QUOTED:
                quoted[kind].append(line(kind, seed, entry["number"], Finding(category, what)))
    return {
        "trials": dict(trials),
        "trials_total": sum(trials.values()),
        "findings": {kind: dict(counts) for kind, counts in found.items()},
        "findings_total": sum(sum(counts.values()) for counts in found.values()),
        "quoted": quoted,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further trial begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--trial", type=int, nargs="+", help="run these trials of each kind, and record nothing")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "attack.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    turbo()
    homologs.e1()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        if options.trial is not None:
            references = References(Path(folder) / "references")
            runs = (attack(options.only, options.seed, 1e9, references, first=n, most=1) for n in options.trial)
            done = [entry for run in runs for entry in run]
        else:
            done = _in_workers(options.only, options.seed, options.seconds, options.workers, Path(folder))
    figures = summary(done, options.seed)
    print(f"{figures['trials_total']} trials, {figures['findings_total']} findings")
    if options.trial is None:
        settings: dict[str, Any] = {"seconds": options.seconds, "workers": options.workers, "seed": options.seed}
        # Without the file, whose path is of one machine.
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        only = [] if options.only == list(KINDS) else ["--only", *options.only]
        settings["command"] = shlex.join(["python", "-m", "benchmarks.attack", *words, *only])
        records.append(options.out, "attack", settings | figures, model="esm2-mini")
    return 1 if figures["findings_total"] else 0


def _in_workers(kinds: Sequence[str], seed: int, seconds: float, workers: int, root: Path) -> list[dict[str, Any]]:
    """Trials of several forks, which take every `workers`-th number each."""
    pids = []
    for number in range(workers):
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            references = References(root / str(number) / "references")
            done = attack(kinds, seed, seconds, references, first=number, step=workers)
            (root / f"{number}.json").write_text(json.dumps(done))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    done = []
    for number, pid in enumerate(pids):
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError(f"worker {number} of {workers} failed")
        done += json.loads((root / f"{number}.json").read_text())
    return done


if __name__ == "__main__":
    sys.exit(main())
