"""The benchmark of identities, on a small model and the CPU."""

from __future__ import annotations

from benchmarks.cuda.identity import identity_case
from benchmarks.harness.models import Architecture

SMALL = Architecture("small", num_layers=2, num_heads=2, head_dim=16, intermediate_size=32)


def test_a_small_model() -> None:
    case = identity_case(SMALL, 20, 3, 1.02, "cpu")
    assert case.check().passed
    figures = case.measure(2)
    assert isinstance(figures, dict) and len(figures["seconds"]) == 6
    assert figures["ratios"]["extension / without checks"] > 0
