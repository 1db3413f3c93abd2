"""Random changes of weights."""

from __future__ import annotations

import random

import torch

from benchmarks.attack.weights import change
from esm_turbo import TurboEsm


def test_every_change_changes_what_the_model_computes() -> None:
    said = set()
    for seed in range(12):
        model = TurboEsm.from_pretrained(device="cpu").model
        ids = torch.tensor([[0, 20, 15, 11, 6, 4, 10, 2]])
        with torch.no_grad():
            before = model(ids).logits
            said.add(change(random.Random(seed), model).partition(",")[0])
            assert not torch.equal(model(ids).logits, before)
    assert len(said) >= 4
