"""Calls of the public API on a CUDA device, from strings to results, compared with Hugging Face's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import EsmForMaskedLM

from benchmarks.harness import cuda_timing
from benchmarks.harness.embedded import shipped_proteins
from benchmarks.harness.measure import Case, Check, Figures, Target, interleave, largest_difference, ratio, spread
from benchmarks.harness.models import Architecture, masked_lm, random_calibration, turbo_of
from esm_turbo import TurboEsm
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.evaluate.environment import device_name
from esm_turbo.proteins.fasta import token_batches

THEIRS = "Hugging Face's model"
PRODUCTS = "matrix products alone"
# Hidden states after the last layer norm are of size one; bfloat16 has eight bits.
_TOLERANCE = 0.25


def call_cases(
    architecture: Architecture, residues: int, proteins: int, toks_per_batch: Sequence[int]
) -> Iterator[Case]:
    """Prefill of one context, and embedding of many proteins; random weights in bfloat16.

    Args:
        architecture: of the model.
        residues: of the context.
        proteins: shipped proteins to embed, of at most 1,022 residues.
        toks_per_batch: padded tokens per batch.
    """
    if not cuda_timing.available():
        return
    model = masked_lm(architecture, cuda_timing.DEVICE)
    turbo = turbo_of(model, random_calibration(model.esm, [DEFAULT_PRESET]), DEFAULT_PRESET)
    # The two share their weights.
    turbo.model.to(torch.bfloat16)
    shape = {
        **architecture.described(),
        "dtype": "bfloat16",
        "device": cuda_timing.DEVICE,
        "device_name": device_name(model.device),
    }
    known = [record.sequence for record in shipped_proteins() if len(record.sequence) <= 1022]
    sequence = "".join(known)[:residues]
    yield _case(
        f"prefill of {residues}",
        architecture,
        {"context_tokens": residues + 1, "preset": DEFAULT_PRESET, **shape},
        model,
        turbo,
        [sequence],
        {"turbo.prefill": lambda: turbo.prefill(sequence)},
        residues + 1,
        [Target(("seconds", "turbo.prefill", "p50"), at_most=9e-3)],
    )
    chosen = known[:proteins]
    for size in toks_per_batch:
        embed: Callable[..., Any] = partial(turbo.embed, chosen, toks_per_batch=size)
        mean, caches = "turbo.embed, mean", "turbo.embed, mean and caches"
        yield _case(
            f"embedding, batches of {size} tokens",
            architecture,
            {"proteins": len(chosen), "residues": sum(map(len, chosen)), "toks_per_batch": size, **shape},
            model,
            turbo,
            chosen,
            {mean: partial(embed, include=["mean"]), caches: partial(embed, include=["mean", "cache"])},
            size,
            [
                Target(("residues_per_second", mean), at_least=250e3),
                Target(("ratios", f"{THEIRS} / {mean}"), at_least=1.7),
                Target(("ratios", f"{mean} / {caches}"), at_least=0.8),
            ],
        )


def _case(
    name: str,
    architecture: Architecture,
    shape: dict[str, Any],
    model: EsmForMaskedLM,
    turbo: TurboEsm,
    sequences: Sequence[str],
    ours: dict[str, Callable[[], object]],
    toks_per_batch: int,
    targets: Sequence[Target],
) -> Case:
    batches = token_batches([len(sequence) + 2 for sequence in sequences], toks_per_batch)[::-1]
    encoded = [
        turbo.tokenizer([sequences[index] for index in batch], padding=True, return_tensors="pt") for batch in batches
    ]
    rows = [(x.input_ids, x.attention_mask) for x in encoded]
    tokens = sum(len(sequence) + 2 for sequence in sequences)

    def check() -> Check:
        input_ids, mask = (x.to(model.device) for x in rows[-1])
        with torch.no_grad():
            theirs = model.esm(input_ids, mask).last_hidden_state
            packed = turbo.model.esm(input_ids, mask, row_lengths=mask.sum(1).tolist()).last_hidden_state
        error = largest_difference(packed[mask.bool()], theirs[mask.bool()])
        return Check("hidden states against Hugging Face's model, largest difference", error, _TOLERANCE)

    def measure(repeats: int) -> Figures:
        arms = {**ours, THEIRS: partial(_means, model, rows), PRODUCTS: partial(_products, architecture, tokens)}
        seconds = spread(interleave({arm: [partial(_finished, call)] for arm, call in arms.items()}, repeats))
        first, *others = ours
        return {
            "seconds": seconds,
            "residues_per_second": {arm: sum(map(len, sequences)) / seconds[arm]["p50"] for arm in arms},
            "ratios": {
                **{f"{THEIRS} / {arm}": ratio(seconds, THEIRS, arm) for arm in ours},
                **{f"{first} / {arm}": ratio(seconds, first, arm) for arm in others},
                **{f"{arm} / {PRODUCTS}": ratio(seconds, arm, PRODUCTS) for arm in ours},
            },
        }

    return Case(name, architecture.name, shape, check, measure, targets)


def _finished(call: Callable[[], object]) -> None:
    """Run a call and wait for the device."""
    call()
    torch.cuda.synchronize()


@torch.no_grad()
def _means(model: EsmForMaskedLM, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Mean embeddings in a plain loop, one copy to the host per batch."""
    means = []
    for input_ids, attention_mask in batches:
        input_ids, attention_mask = input_ids.to(model.device), attention_mask.to(model.device)
        states = model.esm(input_ids, attention_mask).last_hidden_state.float()
        inside = attention_mask.roll(-1, 1)[..., None].float()
        inside[:, -1] = 0
        inside[:, 0] = 0
        means.append(((states * inside).sum(1) / inside.sum(1)).cpu())
    return means


@torch.no_grad()
def _products(architecture: Architecture, tokens: int) -> None:
    """The matrix products of all layers for a number of tokens."""
    hidden, inner = architecture.num_heads * architecture.head_dim, architecture.intermediate_size
    options: dict[str, Any] = {"device": cuda_timing.DEVICE, "dtype": torch.bfloat16}
    weights = [torch.randn(shape, **options) for shape in ((3 * hidden, hidden), (hidden, hidden), (inner, hidden))]
    down = torch.randn(hidden, inner, **options)
    for _ in range(architecture.num_layers):
        # In chunks that fit into memory with a model.
        for start in range(0, tokens, 65536):
            x = torch.empty(min(65536, tokens - start), hidden, **options)
            for weight in weights:
                wide = functional.linear(x, weight)
            functional.linear(wide, down)
