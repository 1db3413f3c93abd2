"""Tables of a CUDA device, from a small run without one; other tables are of stored rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.cuda import calls, cold_start, decode_attention
from benchmarks.harness import records, stored
from benchmarks.harness.measure import Case
from benchmarks.report import tables, tables_gpu
from tests.helpers.benchmark_cases import TINY


def test_tables_of_a_small_run(no_device: None, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"seconds": 2.0, "compilation_seconds": 1.0, "compiled_ahead": 3, "kernels": 3}
    monkeypatch.setattr(cold_start, "in_process", lambda *_: first)
    target = {(2, 70, 2): {"SDPA bf16 / turbo3": 3.2}}
    made: dict[str, Iterator[Case]] = {
        "decode_attention_cuda": iter(decode_attention.attention_cases(((2, 70, 2), (1, 64, 3)), target)),
        "cold_start_cuda": cold_start.cold_cases(TINY, 24, 30.0),
        "calls_cuda": calls.call_cases(TINY, 30, 3, (200,), 5, 3),
    }
    monkeypatch.setattr(run.Settings, "cases", lambda self, name: made[name])
    monkeypatch.setattr(records, "device_name", lambda device: "a device")
    assert run.run_in_turn(list(made), run.Settings(repeats=2, save=True)) == 0
    assert [path.name for path in results.iterdir()] == ["gpu.jsonl"]
    stored.forget()
    monkeypatch.setattr(tables_gpu, "_OVERVIEW", ("2 x 70, 2",))
    for name in ("gpu_attention", "gpu_overview", "gpu_cold_start", "gpu_calls"):
        text = tables.TABLES[name]()
        for word in ("commit", "torch", "transformers", "triton", "a device", "gpu.jsonl"):
            assert word in text, name
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1, name
