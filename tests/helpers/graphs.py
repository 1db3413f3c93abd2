"""Graphs without CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esm_turbo.model import captured, graph_pool


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Tensor]]:
    """Stands in for CUDA: a graph runs its computation anew, which also sees nothing but the graph's own tensors.

    Returns:
        The computations captured, so far and from now on.
    """
    made: list[Callable[[], Tensor]] = []

    def capture(run: Callable[[], Tensor], device: torch.device, memory: object) -> Callable[[], Tensor]:
        made.append(run)
        return run

    monkeypatch.setattr(captured, "capture", capture)
    monkeypatch.setattr(graph_pool, "_memory_limit", lambda device: 2**40)
    return made
