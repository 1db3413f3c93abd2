"""Run the tests that need a CUDA device and append their outcomes to benchmarks/results/gpu_tests.jsonl.

    python -m benchmarks.cuda.gpu_tests [--out FILE] [TEST FILE ...] [PYTEST ARGUMENT ...]

Every test file runs separately and has its own row, so an interruption loses only the current one.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.harness import records

OUTCOMES = ("failure", "error", "skipped")


def summary(report: Path) -> dict[str, object]:
    """Summary of a JUnit report: counts by file and outcome, seconds, and the names of failed tests."""
    by_file: dict[str, Counter[str]] = {}
    failed = []
    seconds = 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((name for name in OUTCOMES if case.find(name) is not None), "passed")
        file = case.get("classname", "").rpartition(".")[2]
        by_file.setdefault(file, Counter())[outcome] += 1
        seconds += float(case.get("time", 0))
        if outcome in ("failure", "error"):
            failed.append(f"{file}::{case.get('name')}")
    total = sum(by_file.values(), Counter())
    return {
        "outcomes": dict(total),
        "by_file": {file: dict(counts) for file, counts in sorted(by_file.items())},
        "failed": failed,
        "test_seconds": round(seconds, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "gpu_tests.jsonl", metavar="FILE")
    options, rest = parser.parse_known_args(arguments)
    files = [argument for argument in rest if Path(argument).is_file()]
    others = [argument for argument in rest if argument not in files]
    return max(_run(options.out, [*others, *file]) for file in ([[file] for file in files] or [[]]))


def _run(out: Path, arguments: list[str]) -> int:
    """Run pytest, append a row, and return the exit code of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", "-m", "gpu", f"--junitxml={report}", *arguments]
        code = subprocess.run([sys.executable, *command], check=False).returncode
        if not report.exists():
            print("pytest wrote no report", file=sys.stderr)
            return code or 1
        figures = summary(report)
    ran = shlex.join(["python", "-m", "benchmarks.cuda.gpu_tests", *arguments])
    records.append(out, "gpu_tests", {"command": ran, **figures}, device="cuda")
    print(figures["outcomes"])
    return code


if __name__ == "__main__":
    sys.exit(main())
