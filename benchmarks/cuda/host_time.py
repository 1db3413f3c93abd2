"""How long the host takes to launch an eager call, whatever the device takes to compute it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.cuda.calls import THEIRS, without_graphs
from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, ratio, spread
from benchmarks.harness.models import Architecture, masked_lm, random_calibration, random_tokens, turbo_of
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.evaluate.environment import device_name

EXTENSION, CALL = "extension", "turbo.extend"
# Calls of each arm per repeat.
_CALLS = 10
_TOLERANCE = 0.25


def host_cases(architecture: Architecture, residues: int, new_tokens: int, at_most: float) -> Iterator[Case]:
    """One row: an extension of one context, without graphs, and a forward of Hugging Face's model, bfloat16.

    Args:
        architecture: of the model, with random weights.
        residues: of the context.
        new_tokens: of the extension.
        at_most: target: fraction of the time of Hugging Face's model.
    """
    if not cuda_timing.available():
        return
    model = masked_lm(architecture, cuda_timing.DEVICE)
    turbo = turbo_of(model, random_calibration(model.esm, [DEFAULT_PRESET]), DEFAULT_PRESET)
    turbo.model.to(torch.bfloat16)
    ids = random_tokens(1, residues + new_tokens).to(model.device)
    past, new = ids[:, : residues + 1], ids[:, residues + 1 :]
    with torch.no_grad():
        cache = turbo.model.esm(past, use_cache=True).past_key_values
    peptide = "M" * new_tokens

    @torch.no_grad()
    def extend() -> torch.Tensor:
        states: torch.Tensor = turbo.model.esm(new, past_key_values=cache).last_hidden_state
        return states

    @torch.no_grad()
    def theirs() -> torch.Tensor:
        states: torch.Tensor = model.esm(ids).last_hidden_state
        return states

    def check() -> Check:
        with without_graphs(turbo):
            eager = extend()
        by_graph = [extend() for _ in range(3)][-1]
        return Check(
            "eager hidden states against those of a graph, largest difference",
            largest_difference(eager, by_graph),
            _TOLERANCE,
        )

    def measure(repeats: int) -> Figures:
        arms = {EXTENSION: extend, CALL: lambda: turbo.extend(cache, peptide), THEIRS: theirs}
        with without_graphs(turbo):
            seconds = spread(_launch_seconds(arms, repeats * _CALLS))
        return {"seconds": seconds, "ratios": {f"{arm} / {THEIRS}": ratio(seconds, arm, THEIRS) for arm in arms}}

    shape = {
        **architecture.described(),
        "context_tokens": residues + 1,
        "new_tokens": new_tokens,
        "dtype": "bfloat16",
        "preset": DEFAULT_PRESET,
        "device": cuda_timing.DEVICE,
        "device_name": device_name(model.device),
    }
    targets = [Target(("ratios", f"{arm} / {THEIRS}"), at_most=at_most) for arm in (EXTENSION, CALL)]
    yield Case("an eager extension", architecture.name, shape, check, measure, targets)


def _launch_seconds(arms: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds until each call returns, with an idle device before it."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(-3, repeats):
        for name, arm in arms.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            arm()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return seconds
