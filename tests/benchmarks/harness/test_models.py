"""Models of random weights, random proteins, and the small trained models with the check of every accuracy row."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import embedded
from benchmarks.harness.models import masked_lm, random_sequences, random_tokens, random_turbo
from esm_turbo.config import PRESETS
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


def test_the_check_finds_a_wrong_frozen_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    [protein] = embedded.evaluation_set("paper_six", 1)
    assert 0 < embedded.exactness(protein).error < 1e-4
    monkeypatch.setattr(embedded, "FROZEN", PRESETS["int8"])
    assert not embedded.exactness(protein).passed


def test_rounding_keeps_seven_digits() -> None:
    assert embedded.rounded({"a": [1 / 3, True, None, "x", 7], "b": (2e-9 / 3,)}) == {
        "a": [0.3333333, True, None, "x", 7],
        "b": [6.666667e-10],
    }
