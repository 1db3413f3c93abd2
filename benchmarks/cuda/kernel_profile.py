"""Hardware counters of the kernel that reads contexts, on a CUDA device. Needs NVIDIA's ncu.

    ncu --clock-control none --kernel-name attend_context --set full -o profile python -m benchmarks.cuda.kernel_profile
    ncu --import profile.ncu-rep --page raw --csv > profile.csv
    python -m benchmarks.cuda.kernel_profile --add profile.csv

The first command profiles every case twice; the last appends a row to results/gpu_profile.jsonl.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cuda.decode_attention import Shape, embedded_codec, name_of, new_tokens, random_context
from benchmarks.harness import records
from benchmarks.harness.names import COUNTERS, LAYER

KERNEL = "attend_context"
CASES: tuple[tuple[str, Shape], ...] = (
    ("turbo4", (64, 4096, 1)),
    ("turbo2", (64, 4096, 1)),
    ("turbo4", (64, 4096, 16)),
)


def figures_of(report: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Counters by case and name, from the raw page of ncu.

    Raises:
        ValueError: the page does not have two launches per case.
    """
    with report.open(newline="") as file:
        head, units, *rows = (row for row in csv.reader(file) if len(row) > 1)
    launches = [row for row in rows if KERNEL in row[head.index("Kernel Name")]]
    if len(launches) != 2 * len(names):
        raise ValueError(f"expected two launches of each of {len(names)} cases, found {len(launches)}")
    found = {}
    for name, launch in zip(names, launches[1::2], strict=True):
        figures = {kept: float(launch[head.index(counter)].replace(",", "")) for kept, counter in COUNTERS.items()}
        if units[head.index(COUNTERS["memory, GB/s"])].startswith("Tbyte"):
            figures["memory, GB/s"] *= 1000
        found[name] = figures
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="CSV", help="raw page of ncu as CSV, to append to the results")
    parser.add_argument("--names", nargs="+", help="names of the profiled cases, if not the default ones")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "gpu_profile.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.add:
        names = options.names or [f"{preset}, {name_of(shape)}" for preset, shape in CASES]
        figures = {"kernel": KERNEL, "cases": figures_of(options.add, names)}
        records.append(options.out, "gpu_profile", figures, model=LAYER, device="cuda")
        return 0
    from esm_turbo.ops import triton_attention as triton_kernels

    for preset, shape in CASES:
        codec = embedded_codec(preset)
        context, new = random_context(codec, *shape[:2]), new_tokens(shape)
        for _ in range(2):
            triton_kernels.extend_attention(*new, None, context, codec, 0)
            torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
