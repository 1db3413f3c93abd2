"""Timing on a CUDA device, as far as it needs none."""

from __future__ import annotations

import torch

from benchmarks.harness import cuda_timing


def test_an_error_is_one_short_line() -> None:
    error = torch.OutOfMemoryError("no room\nfor this " + "x" * 500)
    assert cuda_timing.reason(error) == "OutOfMemoryError: no room"
    assert len(cuda_timing.reason(ValueError("x" * 500))) == len("ValueError: ") + 300


def test_figures_have_failures_only_if_there_are_any() -> None:
    assert cuda_timing.figures({"a": [1.0]}, {}) == {"seconds": {"a": {"p20": 1.0, "p50": 1.0, "p80": 1.0}}}
    assert cuda_timing.figures({}, {"b": "why"}) == {"seconds": {}, "failed": {"b": "why"}}
