"""Runs of `embed`, `store` and `score` on one device by the number of proteins: what does not become shorter with them.

    python -m benchmarks.speed.run_lengths --device cpu --embed 20 40 --store 20 40 --score 10 20
    python -m benchmarks.speed.run_lengths --device cuda:0 --dtype bfloat16 --store 500 1000

Two devices take at least as long as one does for half of the proteins. One worker runs, which has loaded the model and
has run every task once, as in `benchmarks.speed.devices`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import records
from benchmarks.speed.devices import TASKS, WarmUp, add_model_options, loader, shipped_proteins
from esm_turbo.parallel.workers import Workers


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the seconds of each run; `--save` appends them to the project's results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    for name in TASKS:
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[], help="numbers of proteins")
    add_model_options(parser)
    options = parser.parse_args(arguments)
    seconds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        load = loader(options, Path(temporary), options.device)
        turbo = load("cpu")
        with Workers(load, [options.device]) as workers:
            for name, (task, _) in TASKS.items():
                for count in sorted(getattr(options, name)):
                    work = Path(temporary) / name
                    work.mkdir()
                    first = WarmUp(name, shipped_proteins(8), work, 1)
                    list(workers.run(first, range(1), stage="first", units=[1]))
                    proteins = shipped_proteins(count)
                    start = time.perf_counter()
                    task(turbo, proteins, work / "out", workers)
                    seconds.setdefault(name, {})[str(count)] = time.perf_counter() - start
                    print(f"{name} of {count}: {seconds[name][str(count)]:.2f} s", file=sys.stderr, flush=True)
                    shutil.rmtree(work)
    figures = {
        "seconds": seconds,
        "geometry": None if options.layers is None else [options.layers, options.hidden, options.heads],
        "dtype": options.dtype,
    }
    print(json.dumps(figures, indent=2), flush=True)
    if options.save:
        model = turbo.name if options.layers is None else "random weights"
        records.append(
            records.RESULTS / "run_lengths.jsonl", "run_lengths", figures, model=model, device=options.device
        )


if __name__ == "__main__":
    main()
