"""Runs benchmarks and prints their rows; with --out also adds them to a file of JSON lines.

    python -m benchmarks.run [NAME ...] [--repeats N] [--threads N] [--out benchmarks/results/cpu.jsonl]

Every row is checked for correct results before anything is timed; one that fails is refused, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks import records
from benchmarks.measure import Case, Check, Figures
from benchmarks.registry import BENCHMARKS

REPEATS = 9


def run_case(benchmark: str, case: Case, repeats: int) -> Figures | None:
    """Checks one case, then measures it; None where the check fails.

    Args:
        benchmark: the name in the registry.
        case: what to measure.
        repeats: of everything timed.
    """
    check = case.check()
    print(f"\n{benchmark} · {case.name} · {case.model}")
    print(f"  check: {check.what}: {check.error:.2g}, allowed {check.tolerance:.2g}")
    if not check.passed:
        print("  REFUSED: the results are wrong, nothing was timed", file=sys.stderr)
        return None
    load = os.getloadavg()[0]
    measured = case.measure(repeats)
    figures = {
        "benchmark": benchmark,
        "case": case.name,
        "command": shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
        "shape": dict(case.shape),
        "repeats": repeats,
        "load_average_before": load,
        "check": _as_dict(check),
        **measured,
        "targets": [target.judge(measured) for target in case.targets],
    }
    _show(figures)
    return figures


def _as_dict(check: Check) -> dict[str, Any]:
    return {"what": check.what, "error": check.error, "tolerance": check.tolerance}


def _show(figures: Figures) -> None:
    for arm, seconds in figures.get("seconds", {}).items():
        print(f"  {arm:34}" + "".join(f"  {name} {1e3 * value:9.2f} ms" for name, value in seconds.items()))
    for group in ("ratios", "growth"):
        for name, value in figures.get(group, {}).items():
            print(f"  {group} {name:34}  {value:.3f}")
    for name, sizes in figures.get("bytes", {}).items():
        print(f"  bytes {name}: {sizes}")
    for target in figures["targets"]:
        bound = f"at most {target['at_most']}" if "at_most" in target else f"at least {target['at_least']}"
        print(f"  {'met' if target['met'] else 'MISSED':6} {target['figure']}: {target['found']:.3g}, {bound}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    listed = "\n".join(f"  {name:24} {benchmark.summary}" for name, benchmark in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks; all by default")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of PyTorch on the CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, added to")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    refused = 0
    for name in options.names or BENCHMARKS:
        for case in BENCHMARKS[name].cases():
            figures = run_case(name, case, options.repeats)
            refused += figures is None
            if figures is not None and options.out is not None:
                records.append(options.out, "speed", figures, model=case.model)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
