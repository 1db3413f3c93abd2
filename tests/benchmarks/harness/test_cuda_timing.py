"""Timing on a CUDA device, as far as it needs none."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import cuda_timing


def test_an_error_is_one_short_line() -> None:
    error = torch.OutOfMemoryError("no room\nfor this " + "x" * 500)
    assert cuda_timing.reason(error) == "OutOfMemoryError: no room"
    assert len(cuda_timing.reason(ValueError("x" * 500))) == len("ValueError: ") + 300


def test_figures_have_failures_only_if_there_are_any() -> None:
    assert cuda_timing.figures({"a": [1.0]}, {}) == {"seconds": {"a": {"p20": 1.0, "p50": 1.0, "p80": 1.0}}}
    assert cuda_timing.figures({}, {"b": "why"}) == {"seconds": {}, "failed": {"b": "why"}}


def test_arms_that_fail_are_reported_and_the_others_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def broken() -> None:
        raise RuntimeError("no kernel")

    calls: list[int] = []
    times, failed = cuda_timing.synchronized_seconds({"good": lambda: calls.append(1), "bad": broken}, 3)
    assert failed == {"bad": "RuntimeError: no kernel"}
    assert len(times["good"]) == 3
    # Three warm-up calls, one uncounted round, and three that count.
    assert len(calls) == 7
    assert cuda_timing.synchronized_seconds({"bad": broken}, 3) == ({}, {"bad": "RuntimeError: no kernel"})
