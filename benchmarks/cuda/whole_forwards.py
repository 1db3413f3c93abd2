"""Embedding and prefill of whole proteins, compared with every way in which Hugging Face's model runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import EsmForMaskedLM
from transformers.utils import is_flash_attn_2_available

from benchmarks.cuda.calls import check_hidden_states, sorted_batches, their_means
from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import Case, Check, Figures, ratios, timed
from benchmarks.harness.models import Architecture, described, random_models, random_sequences
from benchmarks.harness.names import EMBED
from esm_turbo import TurboEsm
from esm_turbo.config import DEFAULT_PRESET

PREFILL = "turbo.prefill"
EAGER, SDPA, COMPILED, VARLEN = "eager", "SDPA", "SDPA, compiled", "flash_attention_2, unpadded"
_TOKENS_PER_BATCH = 16384


def mixed_lengths(count: int) -> list[int]:
    """Lengths from 50 to 1,022 residues."""
    generator = random.Random(0)
    return [generator.randint(50, 1022) for _ in range(count)]


SHAPES = {"1 of 512": [510], "8 of 1,024": [1022] * 8, "256 of 52 to 1,024": mixed_lengths(256)}
"""Residues of the proteins of each row; their tokens, which name it, are two more."""


def cases(architecture: Architecture) -> Iterator[Case]:
    """One row for each shape, with random weights in bfloat16."""
    if not cuda_timing.available():
        return
    model, turbo = random_models(architecture, DEFAULT_PRESET, cuda_timing.DEVICE, torch.bfloat16)
    for name, lengths in SHAPES.items():
        yield _case(name, architecture, model, turbo, random_sequences(lengths))


def _case(name: str, architecture: Architecture, model: EsmForMaskedLM, turbo: TurboEsm, proteins: list[str]) -> Case:
    rows = sorted_batches(turbo, proteins, _TOKENS_PER_BATCH)
    residues = sum(map(len, proteins))
    shape = {**described(turbo.model), "proteins": len(proteins), "residues": residues}

    def theirs(implementation: str, compiled: bool = False) -> Callable[[], object]:
        # Compiled once, and again for other lengths.
        encoder = torch.compile(model.esm) if compiled else model.esm

        def run() -> object:
            model.set_attn_implementation(implementation)
            return their_means(encoder, rows)

        return run

    def check() -> Check:
        return check_hidden_states(model, turbo, rows[-1])

    def measure(repeats: int) -> Figures:
        arms: dict[str, Callable[[], object]] = {
            EMBED: partial(turbo.embed, proteins, include=["mean"], toks_per_batch=_TOKENS_PER_BATCH),
            PREFILL: partial(turbo.prefill, proteins[:64]),
            EAGER: theirs("eager"),
            SDPA: theirs("sdpa"),
            COMPILED: theirs("sdpa", compiled=True),
        }
        if is_flash_attn_2_available():
            arms[VARLEN] = theirs("flash_attention_2")
        seconds = timed(arms, repeats)
        counted = dict.fromkeys(arms, residues) | {PREFILL: sum(map(len, proteins[:64]))}
        return {
            "seconds": seconds,
            "unit": "residues",
            "per_second": {arm: counted[arm] / seconds[arm]["p50"] for arm in arms},
            "ratios": ratios(seconds, *((arm, EMBED) for arm in arms if arm not in (EMBED, PREFILL))),
        }

    return Case(name, architecture.name, shape, check, measure)
