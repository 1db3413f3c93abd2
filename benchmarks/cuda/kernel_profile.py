"""What limits the kernel that reads contexts, by the hardware counters of a CUDA device. Needs NVIDIA's ncu.

    ncu --clock-control none --kernel-name attend_context --set full -o profile python -m benchmarks.cuda.kernel_profile
    ncu --import profile.ncu-rep --page raw --csv > profile.csv
    python -m benchmarks.cuda.kernel_profile --add profile.csv

The first runs every case twice, and is profiled; the last adds a row to results/gpu_profile.jsonl.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cuda.decode_attention import Shape, embedded_codec, name_of, new_tokens, random_context
from benchmarks.harness import records

KERNEL = "attend_context"
CASES: tuple[tuple[str, Shape], ...] = (
    ("turbo4", (64, 4096, 1)),
    ("turbo2", (64, 4096, 1)),
    ("turbo4", (64, 4096, 16)),
)
_PART = ".avg.pct_of_peak_sustained_elapsed"
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS = {
    "microseconds": "gpu__time_duration.sum",
    "programs": "launch__grid_size",
    "registers": "launch__registers_per_thread",
    "warp instructions": "smsp__inst_executed.sum",
    "warps of a scheduler": "smsp__warps_active.avg.per_cycle_active",
    "memory, GB/s": "dram__bytes_read.sum.per_second",
    "memory, %": f"gpu__dram_throughput{_PART}",
    "second-level cache, %": f"lts__throughput{_PART}",
    "first-level cache's data, %": f"l1tex__data_pipe_lsu_wavefronts{_PART}",
    "of this for shared memory, %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "instructions issued, %": f"sm__issue_active{_PART}",
    "integer and logic, %": f"sm__pipe_alu_cycles_active{_PART}",
    "tensor cores, %": f"sm__pipe_tensor_cycles_active{_PART}",
    "cycles of an instruction": "smsp__average_warps_active_per_inst_executed.ratio",
    "of these waiting for memory": _STALLED.format("long_scoreboard"),
    "of these waiting for results": _STALLED.format("wait"),
    "of these waiting for shared memory": _STALLED.format("short_scoreboard"),
}
"""What is kept, and ncu's names."""


def figures_of(report: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The counters of every case, by name, from ncu's page of raw values.

    Raises:
        ValueError: there are not two launches of each case.
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
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="CSV", help="ncu's raw page, as comma-separated values")
    parser.add_argument("--names", nargs="+", help="of the cases, where others than these were run")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "gpu_profile.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.add:
        names = options.names or [f"{preset}, {name_of(shape)}" for preset, shape in CASES]
        figures = {"kernel": KERNEL, "cases": figures_of(options.add, names)}
        model = "maps and bits of a layer of esm2-mini, random codes"
        records.append(options.out, "gpu_profile", figures, model=model, device="cuda")
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
