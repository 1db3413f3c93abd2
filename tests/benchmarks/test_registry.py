"""The registry: groups and names."""

from __future__ import annotations

import pytest
import torch

from benchmarks import run
from benchmarks.harness import records
from benchmarks.registry import BENCHMARKS, EXPERIMENTS, GPU_BENCHMARKS, TIMED
from esm_turbo.config import COMPARISON_PRESETS, PRESETS, PRODUCT_PRESETS


def test_cuda_benchmarks_are_a_group_of_their_own() -> None:
    assert run.GROUPS["gpu"] is GPU_BENCHMARKS
    assert not GPU_BENCHMARKS.keys() & BENCHMARKS.keys()
    assert all(name.endswith("_cuda") for name in GPU_BENCHMARKS)
    assert not any(name.endswith("_cuda") for name in BENCHMARKS)
    assert TIMED.keys() == GPU_BENCHMARKS.keys() | BENCHMARKS.keys()
    settings = run.Settings(repeats=9, save=True)
    assert settings.file("calls_cuda") == records.RESULTS / "gpu.jsonl"
    assert settings.file("short_contexts") == records.RESULTS / "cpu.jsonl"
    assert run.Settings(repeats=50).repeats_of("calls_cuda") == 5
    assert run.Settings(repeats=50).repeats_of("short_contexts") == 50


@pytest.mark.parametrize("name", GPU_BENCHMARKS)
def test_there_are_no_cases_without_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(GPU_BENCHMARKS[name].cases()) == []


def test_accuracy_covers_every_preset_and_set_once() -> None:
    cases = [case.name for name in ("accuracy", "accuracy_codecs") for case in EXPERIMENTS[name].cases(None)]
    assert cases == ["cath_val200", "long_human"] * 2
    assert set(PRESETS) == {*PRODUCT_PRESETS, *COMPARISON_PRESETS}
