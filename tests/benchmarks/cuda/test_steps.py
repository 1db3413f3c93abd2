"""Whole extensions, with PyTorch in place of the kernels."""

from __future__ import annotations

from benchmarks.cuda import steps as cuda_steps
from tests.helpers.benchmark_cases import TINY


def test_extension_steps(no_device: None) -> None:
    presets = ("exact", "turbo3", "paper")
    cases = list(cuda_steps.step_cases(TINY, 40, (3, 1), presets, at_most=2e-3))
    assert [case.name for case in cases] == ["3 on 40", "1 on 40"]
    for case in cases:
        check = case.check()
        assert check.passed
        figures = case.measure(2)
        assert {"recompute, eager", "extend turbo3, eager", "extend exact, eager"} <= figures["seconds"].keys()
        # Nothing can be captured here.
        assert {"recompute, captured", "extend turbo3, captured"} <= figures["failed"].keys()
        assert figures["ratios"].keys() == {f"recompute, eager / extend {preset}, eager" for preset in presets}
        judged = [target.judge(figures) for target in case.targets]
        assert [(one["found"], one["met"]) for one in judged] == [(None, False)] * 2
