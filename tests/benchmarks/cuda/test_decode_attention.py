"""Attention at every shape, with PyTorch in place of the kernels."""

from __future__ import annotations

import pytest

from benchmarks.cuda import decode_attention
from benchmarks.harness import names
from tests.helpers.benchmark_cases import measured


def test_attention(no_device: None) -> None:
    targets = {(2, 70, 1): {"SDPA bf16 / turbo3": 3.2}}
    shapes = ((2, 70, 1), (1, 64, 3))
    cases = list(decode_attention.attention_cases(shapes, targets))
    assert [case.name for case in cases] == ["batch 2 x 70, 1 query", "batch 1 x 64, 3 queries"]
    assert [len(case.targets) for case in cases] == [1, 0]
    figures = [measured(case) for case in cases]
    for row in figures:
        assert {"SDPA bf16", "SDPA fp32", *names.COMPRESSED} <= row["seconds"].keys()
        assert row["SDPA bf16 backend"] in row["SDPA bf16 seconds by backend"]
        rate = row["bytes"]["turbo2"] / row["seconds"]["turbo2"]["p50"] / 1e9
        assert row["GB/s"]["turbo2"] == pytest.approx(rate)
    assert figures[0]["bytes"]["SDPA bf16"] == 2 * 2 * 20 * 70 * 64 * 2
    assert figures[0]["bytes"]["paper"] == figures[0]["bytes"]["SDPA bf16"] // 4
