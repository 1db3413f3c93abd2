"""Embedding many proteins on the CPU, compared with plain loops over Hugging Face's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import EsmForMaskedLM, EsmModel, EsmTokenizer

from benchmarks.harness.embedded import plain_model, shipped_proteins
from benchmarks.harness.environment import device_name
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, ratios, timed, worst
from benchmarks.harness.models import Architecture, masked_lm, turbo_of
from benchmarks.harness.names import EMBED, FILE_ORDER, SAME_BATCHES
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.proteins.batches import token_batches

TOKS_PER_BATCH = 4096
DEFAULT_BATCH = 8
"""Proteins per batch in the simplest loop."""

_INCLUDE = ("mean", "per_tok")
# Hidden states after the last layer norm are of size one.
_TOLERANCE = 1e-4
Result = list[tuple[Tensor, Tensor]]
"""Hidden states of the residues [L, hidden_size] and their mean per protein."""


def embedded_cases(proteins: int) -> Iterator[Case]:
    """The embedded model."""
    yield _case(EMBEDDED_MODEL.name, plain_model(), proteins)


def random_cases(architecture: Architecture, proteins: int) -> Iterator[Case]:
    """Random weights in the geometry of a larger model."""
    yield _case(architecture.name, masked_lm(architecture), proteins)


def _case(name: str, model: EsmForMaskedLM, proteins: int) -> Case:
    turbo = turbo_of(model)
    sequences = [record.sequence for record in shipped_proteins()[:proteins]]
    # Tokenised before the clock starts: not counted in the plain loops, but counted in ours.
    same, default = (_batched(sequences, same=same) for same in (True, False))
    arms = {
        SAME_BATCHES: partial(_plain, model, *same),
        FILE_ORDER: partial(_plain, model, *default),
        EMBED: partial(_ours, turbo, sequences),
    }
    residues = sum(map(len, sequences))

    def check() -> Check:
        ours = _ours(turbo, sequences)
        errors = [_difference(ours, _plain(model, *batches)) for batches in (same, default)]
        return Check("hidden states and means against the plain loops, largest difference", worst(errors), _TOLERANCE)

    def measure(repeats: int) -> Figures:
        seconds = timed(arms, repeats)
        return {
            "seconds": seconds,
            "residues_per_second": {arm: residues / seconds[arm]["p50"] for arm in arms},
            "ratios": ratios(seconds, (EMBED, SAME_BATCHES), (FILE_ORDER, EMBED)),
        }

    return Case(
        name=f"{name}, float32, cpu",
        model=name,
        shape={
            "proteins": proteins,
            "residues": residues,
            "longest": max(map(len, sequences)),
            "layers": model.config.num_hidden_layers,
            "hidden_size": model.config.hidden_size,
            "toks_per_batch": TOKS_PER_BATCH,
            "include": list(_INCLUDE),
            "dtype": "float32",
            "device": "cpu",
            "device_name": device_name("cpu"),
        },
        check=check,
        measure=measure,
        targets=[
            Target(("ratios", f"{EMBED} / {SAME_BATCHES}"), at_most=1.0),
            Target(("ratios", f"{FILE_ORDER} / {EMBED}"), at_least=1.0),
        ],
    )


def _ours(turbo: TurboEsm, sequences: Sequence[str]) -> Result:
    last = turbo.model.config.num_hidden_layers
    return [
        (embedding.representations[last], embedding.mean_representations[last])
        for embedding in turbo.embed(sequences, include=_INCLUDE, toks_per_batch=TOKS_PER_BATCH)
        if embedding.representations is not None and embedding.mean_representations is not None
    ]


def _batched(sequences: Sequence[str], *, same: bool) -> tuple[list[list[int]], list[tuple[Tensor, Tensor]]]:
    """Indices and tokens of batches: by token budget, longest first, or in the order of the file."""
    tokenizer = EsmTokenizer.from_pretrained(EMBEDDED_MODEL)
    if same:
        batches = token_batches([len(sequence) + 2 for sequence in sequences], TOKS_PER_BATCH)[::-1]
    else:
        indices = list(range(len(sequences)))
        batches = [indices[begin : begin + DEFAULT_BATCH] for begin in range(0, len(indices), DEFAULT_BATCH)]
    tokens = []
    for batch in batches:
        encoded = tokenizer([sequences[index] for index in batch], padding=True, return_tensors="pt")
        tokens.append((encoded.input_ids, encoded.attention_mask))
    return batches, tokens


@torch.no_grad()
def _plain(model: EsmForMaskedLM, batches: Sequence[Sequence[int]], tokens: Sequence[tuple[Tensor, Tensor]]) -> Result:
    """A plain loop: one forward pass per batch, then the rows of each protein."""
    encoder: EsmModel = model.esm
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for batch, (input_ids, attention_mask) in zip(batches, tokens, strict=True):
        states = encoder(input_ids, attention_mask).last_hidden_state
        for index, own, n in zip(batch, states, attention_mask.sum(1).tolist(), strict=True):
            residues = own[1 : n - 1].clone()
            found[index] = residues, residues.mean(0)
    return [found[index] for index in range(len(found))]


def _difference(ours: Result, plain: Result) -> float:
    return worst(
        largest_difference(mine, theirs)
        for protein, other in zip(ours, plain, strict=True)
        for mine, theirs in zip(protein, other, strict=True)
    )
