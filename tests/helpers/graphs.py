"""Graphs without CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esm_turbo.model import executor
from esm_turbo.model.graphs import GraphPool

Computations = list[Callable[[], Tensor]]


def pool_without_cuda(captures: Computations, most: int = 64, memory_limit: int = 2**40) -> GraphPool:
    """A pool whose graphs run their computation anew, which also sees nothing but the graph's own tensors.

    Args:
        captures: is extended by what is captured.
        most: as in `GraphPool`.
        memory_limit: as in `GraphPool`.
    """

    def capture(run: Callable[[], Tensor], device: torch.device, memory: object) -> Callable[[], Tensor]:
        captures.append(run)
        return run

    return GraphPool(capture, most, memory_limit)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Computations:
    """Lets the forwards of models made from now on be captured by `pool_without_cuda`; returns its `captures`."""
    captures: Computations = []
    monkeypatch.setattr(executor.Executor, "addresses", lambda self: (1,) if self.captures else None)
    monkeypatch.setattr(executor, "GraphPool", lambda: pool_without_cuda(captures))
    return captures
