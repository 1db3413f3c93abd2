"""Generation as plain loops over Hugging Face's model, the slow reference, and by captured and eager steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm
from esm_turbo.tasks.generation.generate import GenerationOutput

PREFIX = "MKTAYIAKQRQISFVKSHFSRQ"
STANDARD = list(range(4, 24))
"""Token ids of the 20 standard residues."""
# Logits of the tiny model are of order ten; float32 over two layers.
ATOL = 1e-3


@torch.no_grad()
def full_logits(hf: EsmForMaskedLM, ids: Sequence[int]) -> Tensor:
    """Logits of a row that runs alone and as a whole, [n, vocab_size]."""
    return hf(torch.tensor([list(ids)])).logits[0]


def plain_draw(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[int, float]:
    """A standard residue, and its log-probability among all tokens."""
    log_probs = logits.log_softmax(-1)
    if temperature == 0:
        token = max(STANDARD, key=lambda i: float(logits[i]))
    else:
        weights = torch.zeros(33)
        weights[STANDARD] = (logits[STANDARD] / temperature).softmax(-1)
        token = int(torch.multinomial(weights, 1, generator=generator))
    return token, float(log_probs[token])


def by_graphs_and_eagerly(
    turbo: TurboEsm, sequences: str | list[str], **options: object
) -> tuple[GenerationOutput, GenerationOutput]:
    """Generate by captured steps, and by eager ones."""
    outputs = []
    for captured in (True, False):
        turbo.model.esm.captures = captured
        outputs.append(turbo.generate(sequences, **options))
    turbo.model.esm.captures = True
    return outputs[0], outputs[1]


def assert_same_output(one: GenerationOutput, other: GenerationOutput, atol: float) -> None:
    """Check that residues are the same, and their log-probabilities within a tolerance."""
    assert (one.sequences, one.positions) == (other.sequences, other.positions)
    torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=atol)
