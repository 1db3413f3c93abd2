"""Small cases of benchmarks, and how tests run them."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness.measure import Case, Check, Figures
from benchmarks.harness.models import Architecture

TINY = Architecture("tiny", num_layers=2, num_heads=2, head_dim=32, intermediate_size=64)


def empty_case(check: float = 0.0, figures: Figures | list[Figures] | None = None) -> Case:
    """A case that measures nothing."""
    return Case(
        name="a case",
        model="a model",
        shape={"tokens": 3},
        check=lambda: Check("nothing", check, 0.5),
        measure=lambda repeats: {"repeats seen": repeats} if figures is None else figures,
    )


def measured(case: Case, repeats: int = 2) -> dict[str, Any]:
    """The figures of a case whose check passes; they and the shape are valid JSON."""
    check = case.check()
    assert check.passed, check
    figures = case.measure(repeats)
    assert isinstance(figures, dict)
    for target in case.targets:
        target.judge(figures)
    json.dumps([figures, dict(case.shape)], allow_nan=False)
    return figures
