"""Reads and writes of attention alone, with PyTorch in place of the kernels."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cuda import bare_reads
from benchmarks.harness.names import BARE
from tests.helpers.benchmark_cases import measured


def test_the_reference_adds_up_all_words_of_an_item() -> None:
    words = torch.ones(4, 3, 70, dtype=torch.int32)
    maps = torch.tensor([[10], [20]], dtype=torch.int32).expand(2, 128)
    sums = bare_reads.bare_reads_reference(words, maps, 100 * maps)
    # A part has two words in each of the first six columns, and reads two of a map, as an item does at the end.
    assert sums[0, :7].tolist() == [3 * 2 + 3 * 20 + 2000] * 6 + [3 + 3 * 20 + 2000]
    assert sums[1, 6] == 3 + 3 * 40 + 4000
    assert torch.equal(sums[:2], sums[2:])


def test_sums_wrap_around() -> None:
    words = torch.full((1, 1, 128), 2**30, dtype=torch.int32)
    zeros = torch.zeros(1, 64, dtype=torch.int32)
    assert bare_reads.bare_reads_reference(words, zeros, zeros).eq(-(2**31)).all()


def test_cases(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = bare_reads.read_cases(((2, 70, 1),), ("turbo3", "turbo2"))
    assert case.name == "batch 2 x 70, 1 query"
    figures = measured(case)
    ratios = figures["ratios"]
    for preset in ("turbo3", "turbo2"):
        bare = f"{BARE} of {preset}"
        # The shortest name is the fastest arm here.
        assert figures["seconds"][bare]["p50"] == figures["seconds"][f"{bare}, 1 parts"]["p50"]
        assert ratios[f"SDPA bf16 / {bare}"] == pytest.approx(
            figures["seconds"]["SDPA bf16"]["p50"] / figures["seconds"][bare]["p50"]
        )
        assert f"{preset} / {bare}" in ratios
