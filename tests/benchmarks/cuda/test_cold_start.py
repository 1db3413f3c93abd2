"""First calls as far as a machine without a device makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.cuda import cold_start
from tests.helpers.benchmark_cases import TINY, measured


def test_first_calls(no_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", ""))
    called = []
    monkeypatch.setattr(cold_start, "everyday_calls", called.append)
    sizes = (TINY.num_layers, TINY.num_heads, TINY.head_dim, TINY.intermediate_size)
    figures = cold_start.main(str(tmp_path), sizes)
    assert len(called) == 1
    # Nothing is compiled on a CPU.
    assert figures["kernels"] == figures["compiled_ahead"] == 0
    monkeypatch.setattr(cold_start, "in_process", lambda *_: figures)
    (case,) = cold_start.cold_cases(TINY, 24, 30.0)
    assert measured(case)["seconds"].keys() == {cold_start.COLD, cold_start.WARM}
    assert all(target.judge({**measured(case)})["met"] for target in case.targets)
