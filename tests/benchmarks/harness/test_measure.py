"""Checks, targets, timing, and processes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import (
    Check,
    Target,
    in_process,
    interleave,
    largest_difference,
    ratios,
    spread,
    worst,
)


def test_nan_fails_a_check() -> None:
    assert Check("", 0.5, 0.5).passed
    assert not Check("", 0.6, 0.5).passed
    assert not Check("", math.nan, 0.5).passed


@pytest.mark.parametrize(
    ("target", "found", "met"),
    [
        (Target(("ratios", "a / b"), at_most=2.0), 1.5, True),
        (Target(("ratios", "a / b"), at_least=2.0), 1.5, False),
        (Target(("ratios", "missing"), at_most=2.0), None, False),
        (Target(("ratios", "a / b", "deeper"), at_most=2.0), None, False),
    ],
)
def test_targets(target: Target, found: float | None, met: bool) -> None:
    judged = target.judge({"ratios": {"a / b": 1.5}})
    assert (judged["found"], judged["met"]) == (found, met)
    assert judged["figure"] == " ".join(target.figure)
    assert ("at_most" in judged) == (target.at_most is not None)


def test_arms_take_turns_in_both_orders() -> None:
    calls: list[str] = []
    times = interleave({name: partial(calls.append, name) for name in "ab"}, 2)
    # A warm-up round, then two that count; every other round in reverse order.
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}


def test_spread_and_ratio() -> None:
    seconds = spread({"a": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "b": [2.0]})
    assert seconds["a"] == pytest.approx({"p20": 2.0, "p50": 3.5, "p80": 5.0})
    assert seconds["b"] == {"p20": 2.0, "p50": 2.0, "p80": 2.0}
    # Of "c", which was not measured, there is none.
    assert ratios(seconds, ("a", "b"), ("a", "c")) == {"a / b": 1.75}


def test_the_worst_error_is_nan_if_any_is() -> None:
    assert worst([0.1, 0.3, 0.2]) == 0.3
    assert math.isnan(worst([0.1, math.nan, 0.2]))
    assert largest_difference(torch.tensor([1, 2]), torch.tensor([1.5, 1.0])) == 1.0


def test_a_module_runs_in_a_process_of_its_own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measured.py").write_text(
        "import json, os, sys\nprint('noise')\n"
        "print(json.dumps({'arguments': sys.argv[1:], 'threads': os.environ['OMP_NUM_THREADS']}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert in_process("measured", 3, "x") == {"arguments": ["3", "x"], "threads": str(torch.get_num_threads())}


def test_an_error_is_one_short_line() -> None:
    error = torch.OutOfMemoryError("no room\nfor this " + "x" * 500)
    assert cuda_timing.reason(error) == "OutOfMemoryError: no room"
    assert len(cuda_timing.reason(ValueError("x" * 500))) == len("ValueError: ") + 300


def test_figures_have_failures_only_if_there_are_any() -> None:
    assert cuda_timing.figures({"a": [1.0]}, {}) == {"seconds": {"a": {"p20": 1.0, "p50": 1.0, "p80": 1.0}}}
    assert cuda_timing.figures({}, {"b": "why"}) == {"seconds": {}, "failed": {"b": "why"}}
