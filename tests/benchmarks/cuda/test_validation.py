"""Kernels against dense attention, with PyTorch in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.cuda import decode_attention
from benchmarks.cuda import steps as cuda_steps
from benchmarks.cuda import validation as cuda_validation
from esm_turbo.ops import torch_ops
from esm_turbo.ops import triton_attention as triton_kernels
from esm_turbo.ops.backends import TritonBackend
from tests.helpers.benchmark_cases import TINY, measured


def test_kernels_are_compared_with_dense_attention(no_device: None) -> None:
    cases = list(cuda_validation.kernel_cases(TINY, 70, (1, 4), ("paper", "turbo3")))
    assert len(cases) == 8
    for case in cases:
        figures = measured(case)
        assert figures["layers"] == 2 == len(figures["relative_errors"])
        assert figures["cosine_min"] > 0.999


def test_a_wrong_kernel_is_refused(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> torch.Tensor:
        return 1.05 * torch_ops.extend_attention(*arguments)

    monkeypatch.setattr(triton_kernels, "extend_attention", wrong)
    monkeypatch.setattr(TritonBackend, "extend_attention", staticmethod(wrong))
    for case in cuda_validation.kernel_cases(TINY, 70, (1,), ("turbo3",)):
        assert not case.check().passed
    for case in cuda_steps.step_cases(TINY, 40, (1,), ("turbo3",)):
        assert case.check().error >= 0.0
    [case] = decode_attention.attention_cases(((1, 64, 2),), {})
    assert not case.check().passed


def test_prefill_similarity(no_device: None) -> None:
    cases = list(cuda_validation.similarity_cases(TINY, (30,), "turbo3"))
    assert [case.shape["dtype"] for case in cases] == ["bfloat16", "float32"]
    for case in cases:
        figures = measured(case)
        assert figures["layers"] == 2 and figures["stored_tokens"] == 30
        assert figures["hidden_states"]["cosine_min"] > 0.9999
        assert figures["logits"]["cosine_min"] > 0.9999
        assert len(figures["hidden_states"]["cosine_mean_by_layer"]) == 3


def test_decode_path(no_device: None) -> None:
    [case] = cuda_validation.decode_cases(TINY, (70,), ("turbo3",))
    figures = measured(case)
    assert figures["ratios"].keys() == {
        f"turbo3, PyTorch, {kind} / turbo3, kernels, {kind}" for kind in ("eager", "captured")
    }
