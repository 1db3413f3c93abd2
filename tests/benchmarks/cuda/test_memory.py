"""Memory of extensions and of resident contexts, with a device that is simulated."""

from __future__ import annotations

import pytest

from benchmarks.cuda import memory as cuda_memory
from tests.helpers.benchmark_cases import TINY, measured


def test_memory(no_device: None) -> None:
    [case] = cuda_memory.extension_cases(TINY, 16, 100, (1, 4), ("turbo2",), at_most=0.02)
    figures = measured(case)
    assert figures["bytes"]["extra"] == {"1": 500, "4": 500}
    assert figures["part_of_cache"]["1"] == 500 / figures["bytes"]["packed"]
    # 2 bits an element and 16 x 100 tokens, within what the preset's groups round to.
    assert figures["bytes"]["packed"] == pytest.approx(16 * 100 * 2 * 2 * 2 * 32 * 2 / 8, rel=0.3)
