"""Run benchmarks and experiments and print their figures; with --out or --save, also append them to JSON lines files.

    python -m benchmarks.run [NAME ...] [--repeats N] [--threads N] [--cases TEXT] [--out benchmarks/results/cpu.jsonl]
    python -m benchmarks.run results --threads 1 --save
    python -m benchmarks.run gpu --threads 16 --save

The results of every row are checked before anything is measured. A row that fails is refused, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.harness import records
from benchmarks.harness.measure import Case, Figures
from benchmarks.registry import BENCHMARKS, EXPERIMENTS, GPU_BENCHMARKS, TIMED, Benchmark, Experiment

REPEATS = 9
GROUPS: dict[str, Mapping[str, Benchmark | Experiment]] = {
    "speed": BENCHMARKS,
    "gpu": GPU_BENCHMARKS,
    "results": EXPERIMENTS,
}
"""Groups of benchmarks by name: speed on the CPU, speed and memory on a CUDA device, and accuracy."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        repeats: of each measurement.
        threads: of PyTorch on the CPU.
        max_proteins: maximum number of proteins per set of an experiment; None for all.
        out: file to append rows to, or None.
        save: append rows to their files in benchmarks/results/.
        seconds: after which no further case is started; None for no limit.
        only: text in the names of the cases that are run; empty runs all.
    """

    repeats: int = REPEATS
    threads: int = 1
    max_proteins: int | None = None
    out: Path | None = None
    save: bool = False
    seconds: float | None = None
    only: str = ""

    def cases(self, name: str) -> Iterable[Case]:
        """The cases of a benchmark or an experiment."""
        cases = TIMED[name].cases() if name in TIMED else EXPERIMENTS[name].cases(self.max_proteins)
        return (case for case in cases if self.only in case.name)

    def repeats_of(self, name: str) -> int:
        """Repeats of each measurement of a benchmark."""
        most = TIMED[name].most_repeats if name in TIMED else None
        return self.repeats if most is None else min(self.repeats, most)

    def command(self, name: str) -> str:
        """The command that reproduces these rows, without the output file."""
        words = ["python", "-m", "benchmarks.run", name, "--threads", str(self.threads)]
        if name in TIMED:
            words += ["--repeats", str(self.repeats)]
        elif self.max_proteins is not None:
            words += ["--max-proteins", str(self.max_proteins)]
        words += ["--cases", self.only] if self.only else []
        return shlex.join(words)

    def file(self, name: str) -> Path | None:
        """The file for the rows of a benchmark or an experiment."""
        if self.save:
            own = "gpu" if name in GPU_BENCHMARKS else "cpu" if name in BENCHMARKS else kind_of(name)
            return records.RESULTS / f"{own}.jsonl"
        return self.out


def kind_of(name: str) -> str:
    """The kind of the records of a benchmark or an experiment."""
    return "speed" if name in TIMED else EXPERIMENTS[name].kind or name


def run_case(name: str, case: Case, settings: Settings) -> list[Figures] | None:
    """Check one case, then measure it and write its rows; None if the check fails.

    Args:
        name: of the benchmark in the registry.
        case: to measure.
        settings: of the run.
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
            "check": asdict(check),
            **figures,
            "targets": [target.judge(figures) for target in case.targets],
        }
        rows.append(row)
        lines += _shown(row)
    print("\n".join(lines), flush=True)
    file = settings.file(name)
    if file is not None:
        for row in rows:
            records.append(file, kind_of(name), row, model=case.model, device=str(case.shape.get("device", "cpu")))
    return rows


def run_in_turn(names: Sequence[str], settings: Settings) -> int:
    """Run cases one after another; a failure is reported, and the others continue.

    Args:
        names: of benchmarks and experiments.
        settings: of the run.

    Returns:
        The number of cases that were refused, failed, or left out for lack of time.
    """
    begin, bad = time.perf_counter(), 0
    for name in names:
        cases = iter(settings.cases(name))
        while True:
            case = None
            if settings.seconds is not None and time.perf_counter() - begin > settings.seconds:
                print(f"\n{name}: STOPPED after {settings.seconds:g} s", file=sys.stderr, flush=True)
                bad += 1
                break
            try:
                case = next(cases, None)
                if case is None:
                    break
                bad += run_case(name, case, settings) is None
            except Exception:
                bad += 1
                where = "" if case is None else f" · {case.name}"
                print(f"\n{name}{where}: FAILED\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                if case is None:
                    # A generator that has failed yields no more cases.
                    break
            finally:
                _free_device()
    return bad


def _free_device() -> None:
    """Free the device memory that a case has left behind."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()


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
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        epilog=_listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmark, experiment or group; speed by default")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="repeats of each measurement")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of PyTorch on the CPU")
    parser.add_argument("--seconds", type=float, metavar="N", help="start no further case after N seconds")
    parser.add_argument("--max-proteins", type=int, metavar="N", help="use only the first N proteins per set")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only the cases whose names contain this")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="FILE", help="JSON lines file to append to")
    where.add_argument("--save", action="store_true", help="append to the files in benchmarks/results/")
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(n for name in options.names or ["speed"] for n in GROUPS.get(name, [name])))
    unknown = sorted(set(names) - set(TIMED) - set(EXPERIMENTS))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; choose from {', '.join([*TIMED, *EXPERIMENTS])}")
    if min(options.repeats, options.threads, 1 if options.max_proteins is None else options.max_proteins) < 1:
        parser.error("--repeats, --threads and --max-proteins must be at least 1")
    settings = Settings(
        options.repeats,
        options.threads,
        options.max_proteins,
        options.out,
        options.save,
        options.seconds,
        options.cases,
    )
    _prepare(options.threads)
    return 1 if run_in_turn(names, settings) else 0


def _listed() -> str:
    parts = [f"{group} (all of the following):" + "".join(f"\n  {n:24} {e.summary}" for n, e in members.items())
             for group, members in GROUPS.items()]  # fmt: skip
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
