"""Prefills and encoding, with PyTorch in place of the kernels."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cuda import memory as cuda_memory
from benchmarks.cuda import prefill as cuda_prefill
from benchmarks.harness import gpu_models
from benchmarks.harness.measure import Target
from tests.helpers.benchmark_cases import TINY, measured


def test_prefill_and_encoding(no_device: None) -> None:
    target = Target(("ratios", "encode turbo3, captured / forward"), at_most=0.06)
    [case] = cuda_prefill.prefill_cases(TINY, (40,), ("turbo3", "paper"), {40: [target]})
    figures = measured(case)
    assert "failed" not in figures
    arms = ["forward", *(f"{what} {preset}" for preset in ("turbo3", "paper") for what in ("prefill", "encode"))]
    assert figures["seconds"].keys() == {f"{arm}, {kind}" for arm in arms for kind in ("eager", "captured")}
    assert figures["overhead_seconds"]["turbo3, eager"] == pytest.approx(7e-3)


def test_encoding_alone_equals_a_prefill(no_device: None) -> None:
    ids = gpu_models.tokens(1, 38, eos=True, seed=3)
    [model] = gpu_models.presets_of(TINY, ["turbo3"]).values()
    encode = cuda_prefill.encoding(model, ids)
    encode()
    cache = model.new_cache()
    cache.commit(encode())
    expected = cuda_memory.prefilled(model, ids)
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        assert all(torch.equal(mine.packed[name], theirs.packed[name]) for name in theirs.packed)
