"""Memory of extensions and of resident contexts, with a device that is simulated."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cuda import memory as cuda_memory
from tests.helpers.benchmark_cases import TINY, measured


def test_memory(no_device: None) -> None:
    [case] = cuda_memory.extension_cases(TINY, 16, 100, (1, 4), ("turbo2",), at_most=0.02)
    figures = measured(case)
    assert figures["bytes"]["extra"] == {"1": 500, "4": 500}
    assert figures["part_of_cache"]["1"] == 500 / figures["bytes"]["packed"]
    # 2 bits an element and 16 x 100 tokens, within what the preset's groups round to.
    assert figures["bytes"]["packed"] == pytest.approx(16 * 100 * 2 * 2 * 2 * 32 * 2 / 8, rel=0.3)


@pytest.mark.parametrize("stopped_by", ["memory", "time"])
def test_resident_contexts(stopped_by: str, no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10**9] * 3 + [0] * 10 if stopped_by == "memory" else [10**9] * 50)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 10**9))
    seconds = 60.0 if stopped_by == "memory" else 0.35
    [case] = cuda_memory.resident_cases(TINY, "turbo2", 30, 4, spare=10**6, seconds=seconds, at_least=10)
    used = iter(range(1000, 10**6, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(used))
    if stopped_by == "time":
        clock = iter(range(100))
        monkeypatch.setattr(cuda_memory.time, "perf_counter", lambda: 0.1 * next(clock))
    figures = measured(case)
    assert figures["stopped_by"] == stopped_by
    assert figures["contexts"] == figures["distinct_token_sequences"] == 12
    assert figures["read_again"] == {"batches": 3, "largest_difference": 0.0}
    assert ("contexts_extrapolated" in figures) == (stopped_by == "time")
