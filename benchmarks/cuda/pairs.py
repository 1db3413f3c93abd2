"""`turbo.score_pairs` on a CUDA device, from strings to scores: contexts are computed in every call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.harness import cuda_timing
from benchmarks.harness.embedded import shipped_proteins
from benchmarks.harness.measure import Case, Check, Figures, Target, interleave, ratio, spread
from benchmarks.harness.models import Architecture, masked_lm, random_calibration, turbo_of
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.evaluate.environment import device_name
from esm_turbo.proteins.fasta import STANDARD_RESIDUES

TOGETHER, APART = "turbo.score_pairs", "turbo.score, one target at a time"
# Log-probabilities per residue, in bfloat16 and from other batches.
_TOLERANCE = 0.25


def pair_cases(
    architecture: Architecture, targets: int, lengths: tuple[int, int], peptides: int, residues: int, at_least: float
) -> Iterator[Case]:
    """All pairs of targets and peptides, with random weights in bfloat16.

    Args:
        architecture: of the model.
        targets: number of targets, parts of shipped proteins.
        lengths: residues of the shortest and of the longest.
        peptides: number of peptides, scored on each.
        residues: of a peptide.
        at_least: target for the pairs per second.
    """
    if not cuda_timing.available():
        return
    model = masked_lm(architecture, cuda_timing.DEVICE)
    turbo = turbo_of(model, random_calibration(model.esm, [DEFAULT_PRESET]), DEFAULT_PRESET)
    turbo.model.to(torch.bfloat16)
    shortest, longest = lengths
    text = "".join(record.sequence for record in shipped_proteins())
    sizes = [shortest + (longest - shortest) * index // max(1, targets - 1) for index in range(targets)]
    proteins = [text[longest * index : longest * index + size] for index, size in enumerate(sizes)]
    generator = random.Random(0)
    candidates = ["".join(generator.choices(STANDARD_RESIDUES, k=residues)) for _ in range(peptides)]

    def check() -> Check:
        together = turbo.score_pairs(proteins, candidates)
        apart = [turbo.score(protein, candidates) for protein in proteins]
        pairs = (
            (one.mean_log_probability, other.mean_log_probability)
            for index, alone in enumerate(apart)
            for one, other in zip(together[index].scores, alone.scores, strict=True)
        )
        error = max(abs(one - other) for one, other in pairs)
        return Check(
            "mean log-probabilities, many targets against one at a time, largest difference", error, _TOLERANCE
        )

    def measure(repeats: int) -> Figures:
        arms: dict[str, Callable[[], object]] = {
            TOGETHER: lambda: turbo.score_pairs(proteins, candidates),
            f"{TOGETHER}, frozen": lambda: turbo.score_pairs(proteins, candidates, arm="frozen"),
            APART: lambda: [turbo.score(protein, candidates) for protein in proteins],
        }
        seconds = spread(interleave({arm: [partial(_finished, call)] for arm, call in arms.items()}, repeats))
        return {
            "seconds": seconds,
            "unit": "pairs",
            "per_second": {arm: targets * peptides / seconds[arm]["p50"] for arm in arms},
            "ratios": {f"{APART} / {TOGETHER}": ratio(seconds, APART, TOGETHER)},
        }

    shape = {
        **architecture.described(),
        "targets": targets,
        "context_residues": list(lengths),
        "peptides": peptides,
        "peptide_residues": residues,
        "rows": targets * peptides * residues,
        "preset": DEFAULT_PRESET,
        "dtype": "bfloat16",
        "device": cuda_timing.DEVICE,
        "device_name": device_name(model.device),
    }
    bounds = [Target(("per_second", TOGETHER), at_least=at_least)]
    yield Case(f"{targets} targets x {peptides} peptides", architecture.name, shape, check, measure, bounds)


def _finished(call: Callable[[], object]) -> None:
    """Run a call and wait for the device."""
    call()
    torch.cuda.synchronize()
