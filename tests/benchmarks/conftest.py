"""Benchmarks of a CUDA device on the CPU, and results in a folder of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import cuda_timing, records, stored
from esm_turbo.ops import torch_ops
from esm_turbo.ops import triton_attention as triton_kernels
from esm_turbo.ops.backends import TritonBackend


def timed(arms: Mapping[str, Callable[[], object]], repeats: int, **options: Any) -> tuple[dict, dict]:
    """In place of the clocks of a device: run every arm, and report a millisecond per letter of its name."""
    times, failed = {}, {}
    for name, arm in arms.items():
        try:
            arm()
            times[name] = [len(name) / 1e3] * repeats
        except Exception as error:
            failed[name] = cuda_timing.reason(error)
    return times, failed


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks run on the CPU, with PyTorch's path in place of the kernels."""
    monkeypatch.setattr(cuda_timing, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_timing, "available", lambda: True)
    monkeypatch.setattr(cuda_timing, "captured_seconds", timed)
    monkeypatch.setattr(triton_kernels, "extend_attention", torch_ops.extend_attention)
    monkeypatch.setattr(TritonBackend, "extend_attention", staticmethod(torch_ops.extend_attention))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the project's results."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    stored.forget()
    yield tmp_path
    stored.forget()
