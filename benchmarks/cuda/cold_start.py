"""The first calls on a machine: a fresh process without compiled kernels, which are then compiled side by side."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness import cuda_timing
from benchmarks.harness.embedded import shipped_proteins
from benchmarks.harness.environment import device_name
from benchmarks.harness.measure import Case, Check, Figures, Target, in_process
from benchmarks.harness.models import Architecture, random_turbo
from esm_turbo import TurboEsm
from esm_turbo.config import DEFAULT_PRESET

COLD, WARM = "cold", "warm"


def cold_cases(architecture: Architecture, most_kernels: int, at_most: float) -> Iterator[Case]:
    """One row: everyday calls of every task in fresh processes, bfloat16.

    Args:
        architecture: of the model, with random weights.
        most_kernels: target.
        at_most: target in seconds, where kernels are compiled side by side.
    """
    if not cuda_timing.available():
        return
    found: dict[str, Figures] = {}

    def check() -> Check:
        sizes = (architecture.num_layers, architecture.num_heads, architecture.head_dim, architecture.intermediate_size)
        with tempfile.TemporaryDirectory() as folder:
            for arm in (COLD, WARM):
                found[arm] = in_process("benchmarks.cuda.cold_start", folder, *sizes)
        missing = found[COLD]["kernels"] - found[COLD]["compiled_ahead"]
        return Check("kernels that were not compiled ahead", float(missing), 0.0)

    def measure(repeats: int) -> Figures:
        return {
            # A single run each.
            "seconds": {arm: {"p50": figures["seconds"]} for arm, figures in found.items()},
            "compilation_seconds": {arm: figures["compilation_seconds"] for arm, figures in found.items()},
            "kernels": found[COLD]["kernels"],
            "cores": os.cpu_count(),
        }

    shape = {
        **architecture.described(),
        "dtype": "bfloat16",
        "preset": DEFAULT_PRESET,
        "device": cuda_timing.DEVICE,
        "device_name": device_name(torch.device(cuda_timing.DEVICE)),
    }
    targets = [
        Target(("kernels",), at_most=most_kernels),
        Target(("seconds", COLD, "p50"), at_most=at_most),
    ]
    yield Case("first calls on a machine", architecture.name, shape, check, measure, targets)


def everyday_calls(turbo: TurboEsm) -> None:
    """Prefills, embeddings with caches, extensions, scores, variants and generation, in many shapes."""
    proteins = [record.sequence for record in shipped_proteins() if len(record.sequence) <= 1022]
    context = turbo.prefill(proteins[0])
    for sequence in proteins[1:9]:
        turbo.prefill(sequence)
    turbo.embed(proteins[:24], include=["mean"], return_cache=True)
    peptides = [proteins[number][:12] for number in range(12)]
    for count in range(1, 13):
        turbo.extend(context, peptides[:count])
    for target in proteins[:4]:
        turbo.score(target, [proteins[number][: 8 + number % 8] for number in range(12)])
    for protein in proteins[:2]:
        turbo.score_variants(protein, [f"{protein[9]}10A", f"{protein[19]}20W"])
    turbo.generate(proteins[0], max_new_tokens=3)


def main(folder: str, sizes: tuple[int, int, int, int]) -> Figures:
    """Run everyday calls in this process.

    Args:
        folder: of compiled kernels.
        sizes: layers, heads, components per head and intermediate size of the model.
    """
    os.environ["TRITON_CACHE_DIR"] = folder
    architecture = Architecture("random weights", *sizes)
    turbo = random_turbo(architecture, DEFAULT_PRESET, cuda_timing.DEVICE, torch.bfloat16)
    begin = time.perf_counter()
    compiled_ahead = turbo.warmup()
    compiled = time.perf_counter()
    everyday_calls(turbo)
    torch.cuda.synchronize()
    end = time.perf_counter()
    return {
        "seconds": end - begin,
        "compilation_seconds": compiled - begin,
        "compiled_ahead": compiled_ahead,
        "kernels": len(list(Path(folder).rglob("*.cubin"))),
    }


if __name__ == "__main__":
    folder, *sizes = sys.argv[1:]
    print(json.dumps(main(folder, tuple(map(int, sizes)))))  # type: ignore[arg-type]
