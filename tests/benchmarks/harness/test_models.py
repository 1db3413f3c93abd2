"""Models of random weights, and random proteins."""

from __future__ import annotations

import torch

from benchmarks.harness.models import masked_lm, random_sequences, random_tokens, random_turbo
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from tests.helpers.benchmark_cases import TINY


def test_random_models_follow_the_seed() -> None:
    first, second, other = (
        masked_lm(TINY, seed=seed).esm.encoder.layer[1].attention.self.key.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_a_random_turbo_writes_its_preset() -> None:
    turbo = random_turbo(TINY, "turbo2", dtype=torch.bfloat16)
    assert turbo.prefill("MKTAYIAK").config.name == "turbo2"
    assert turbo.model.dtype == torch.bfloat16


def test_random_proteins() -> None:
    ids = random_tokens(3, 4, eos=True, seed=1)
    assert ids.shape == (3, 6)
    assert (ids[:, 0] == 0).all() and (ids[:, -1] == 2).all() and ((ids[:, 1:-1] >= 4) & (ids[:, 1:-1] <= 23)).all()
    sequences = random_sequences([3, 5], seed=2)
    assert [len(sequence) for sequence in sequences] == [3, 5]
    assert set("".join(sequences)) <= set(STANDARD_RESIDUES)
    assert random_sequences([3, 5], seed=2) == sequences != random_sequences([3, 5], seed=3)
