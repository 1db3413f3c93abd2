"""The cost of identities, on a small model and the CPU."""

from __future__ import annotations

import torch

from benchmarks.speed import identity
from tests.helpers.benchmark_cases import TINY, measured


def test_a_small_model() -> None:
    [case] = identity.cases(TINY, 20, 3, "cpu", torch.float32, calls=2, at_most=1.02)
    figures = measured(case)
    assert len(figures["seconds"]) == 6
    assert figures["ratios"]["extension / without checks"] > 0
