"""Runs benchmarks and experiments and prints what they find; with --out or --save also adds it to files of JSON lines.

    python -m benchmarks.run [NAME ...] [--repeats N] [--threads N] [--out benchmarks/results/cpu.jsonl]
    python -m benchmarks.run results --jobs 16 --save
    python -m benchmarks.run gpu --threads 16 --save

Every row is checked for correct results before anything is measured; one that fails is refused, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.harness import records
from benchmarks.harness.measure import Case, Check, Figures
from benchmarks.registry import BENCHMARKS, EXPERIMENTS, GPU_BENCHMARKS, TIMED, Benchmark, Experiment

REPEATS = 9
GROUPS: dict[str, Mapping[str, Benchmark | Experiment]] = {
    "speed": BENCHMARKS,
    "gpu": GPU_BENCHMARKS,
    "results": EXPERIMENTS,
}
"""Names that stand for several: time on the CPU, time and memory on a CUDA device, and accuracy."""


@dataclass(frozen=True)
class Settings:
    """How rows are made, and where they go.

    Attributes:
        repeats: of everything timed.
        threads: of PyTorch on the CPU.
        max_proteins: of every protein set of an experiment; None for all.
        out: the file that rows are added to, or None.
        save: add rows to their own files in benchmarks/results/.
        seconds: after which no case of a timed benchmark is begun; None for no end.
    """

    repeats: int = REPEATS
    threads: int = 1
    max_proteins: int | None = None
    out: Path | None = None
    save: bool = False
    seconds: float | None = None

    def cases(self, name: str) -> Iterable[Case]:
        """The rows of a benchmark or an experiment."""
        return TIMED[name].cases() if name in TIMED else EXPERIMENTS[name].cases(self.max_proteins)

    def repeats_of(self, name: str) -> int:
        """How often what a benchmark times is repeated."""
        most = TIMED[name].most_repeats if name in TIMED else None
        return self.repeats if most is None else min(self.repeats, most)

    def command(self, name: str) -> str:
        """What makes these rows again. Where they are written to is not part of it."""
        words = ["python", "-m", "benchmarks.run", name, "--threads", str(self.threads)]
        if name in TIMED:
            words += ["--repeats", str(self.repeats)]
        elif self.max_proteins is not None:
            words += ["--max-proteins", str(self.max_proteins)]
        return shlex.join(words)

    def file(self, name: str) -> Path | None:
        """Where the rows of a benchmark or an experiment belong."""
        if self.save:
            own = "gpu" if name in GPU_BENCHMARKS else "cpu" if name in BENCHMARKS else EXPERIMENTS[name].kind
            return records.RESULTS / f"{own}.jsonl"
        return self.out


def run_case(name: str, case: Case, settings: Settings) -> list[Figures] | None:
    """Checks one case, then measures it and writes its rows; None where the check fails.

    Args:
        name: in the registry.
        case: what to measure.
        settings: how.
    """
    check = case.check()
    lines = [f"\n{name} · {case.name} · {case.model}"]
    lines += [f"  check: {check.what}: {check.error:.2g}, allowed {check.tolerance:.2g}"]
    if not check.passed:
        print("\n".join(lines))
        print("  REFUSED: the results are wrong, nothing was measured", file=sys.stderr)
        return None
    load, begin = os.getloadavg()[0], time.perf_counter()
    repeats = settings.repeats_of(name)
    measured = case.measure(repeats)
    lines.append(f"  took {time.perf_counter() - begin:.1f} s")
    rows = []
    for figures in measured if isinstance(measured, list) else [measured]:
        row = {
            "benchmark": name,
            "case": case.name,
            "command": settings.command(name),
            "shape": dict(case.shape),
            "repeats": repeats,
            "load_average_before": load,
            "check": _as_dict(check),
            **figures,
            "targets": [target.judge(figures) for target in case.targets],
        }
        rows.append(row)
        lines += _shown(row)
    print("\n".join(lines), flush=True)
    file = settings.file(name)
    if file is not None:
        kind = "speed" if name in TIMED else EXPERIMENTS[name].kind
        for row in rows:
            records.append(file, kind, row, model=case.model, device=str(case.shape.get("device", "cpu")))
    return rows


def run_in_turn(names: Sequence[str], settings: Settings) -> int:
    """Runs cases one after the other; one that fails is reported, and the others go on.

    Args:
        names: of benchmarks and experiments.
        settings: how.

    Returns:
        How many cases were refused or failed, or were left out for want of time.
    """
    begin, bad = time.perf_counter(), 0
    for name in names:
        cases = iter(settings.cases(name))
        while True:
            case = None
            if settings.seconds is not None and time.perf_counter() - begin > settings.seconds:
                print(f"\n{name}: LEFT OUT, or its rest, after {settings.seconds:g} s", file=sys.stderr, flush=True)
                bad += 1
                break
            try:
                case = next(cases, None)
                if case is None:
                    break
                bad += run_case(name, case, settings) is None
            except Exception:
                bad += 1
                _report_failure(name, case)
                if case is None:
                    # A generator that has failed has no more.
                    break
            finally:
                _free_device()
    return bad


def _report_failure(name: str, case: Case | None) -> None:
    where = "" if case is None else f" · {case.name}"
    print(f"\n{name}{where}: FAILED\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def _free_device() -> None:
    """Gives what a case has left on a device back, so that the next finds all of it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def run_side_by_side(names: Sequence[str], settings: Settings, jobs: int) -> int:
    """Runs the cases of experiments in several processes, one case a process at a time.

    Args:
        names: of experiments.
        settings: how; `threads` is that of every process.
        jobs: processes.

    Returns:
        How many cases were refused or failed.
    """
    # Forked processes would inherit the locks of PyTorch's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare, initargs=(settings.threads,)) as pool:
        futures = [
            pool.submit(_run_one, name, index, settings)
            for name in names
            for index, _ in enumerate(settings.cases(name))
        ]
        return sum(not future.result() for future in as_completed(futures))


def _run_one(name: str, index: int, settings: Settings) -> bool:
    """One case by its place; whether it went well."""
    case = next(case for place, case in enumerate(settings.cases(name)) if place == index)
    try:
        return run_case(name, case, settings) is not None
    except Exception:
        # The others should still end, and be written.
        _report_failure(name, case)
        return False


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()


def _as_dict(check: Check) -> dict[str, Any]:
    return {"what": check.what, "error": check.error, "tolerance": check.tolerance}


def _shown(figures: Figures) -> Iterator[str]:
    for arm, seconds in figures.get("seconds", {}).items():
        yield f"  {arm:34}" + "".join(f"  {name} {1e3 * value:9.2f} ms" for name, value in seconds.items())
    for group in ("ratios", "growth"):
        for name, value in figures.get(group, {}).items():
            yield f"  {group} {name:34}  {value:.3f}"
    for name, sizes in figures.get("bytes", {}).items():
        yield f"  bytes {name}: {sizes}"
    for target in figures["targets"]:
        bound = f"at most {target['at_most']}" if "at_most" in target else f"at least {target['at_least']}"
        found = "not measured" if target["found"] is None else f"{target['found']:.3g}"
        yield f"  {'met' if target['met'] else 'MISSED':6} {target['figure']}: {found}, {bound}"
    for arm, why in figures.get("failed", {}).items():
        yield f"  FAILED {arm}: {why}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        epilog=_listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all of speed by default")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="of everything timed")
    parser.add_argument("--threads", type=int, metavar="N", help="of PyTorch on the CPU; 2, or 1 with --jobs")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, for experiments only")
    parser.add_argument("--seconds", type=float, metavar="N", help="after which no timed case is begun")
    parser.add_argument("--max-proteins", type=int, metavar="N", help="of every protein set, for a quick look")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, added to")
    where.add_argument("--save", action="store_true", help="add to the files in benchmarks/results/")
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(n for name in options.names or ["speed"] for n in GROUPS.get(name, [name])))
    unknown = sorted(set(names) - set(TIMED) - set(EXPERIMENTS))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join([*TIMED, *EXPERIMENTS])}")
    threads = options.threads if options.threads is not None else 1 if options.jobs > 1 else 2
    numbers = (options.repeats, threads, options.jobs, 1 if options.max_proteins is None else options.max_proteins)
    if min(numbers) < 1:
        parser.error("--repeats, --threads, --jobs and --max-proteins must be at least 1")
    settings = Settings(options.repeats, threads, options.max_proteins, options.out, options.save, options.seconds)
    _prepare(threads)
    if options.jobs > 1:
        timed = [name for name in names if name in TIMED]
        if timed:
            parser.error(f"what is timed must run alone, without --jobs: {', '.join(timed)}")
        return 1 if run_side_by_side(names, settings, options.jobs) else 0
    return 1 if run_in_turn(names, settings) else 0


def _listed() -> str:
    parts = [f"{group} (all of these):" + "".join(f"\n  {n:24} {e.summary}" for n, e in members.items())
             for group, members in GROUPS.items()]  # fmt: skip
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
