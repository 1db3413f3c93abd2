"""Tables of a CUDA device, from a small run without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.cuda import calls, cold_start, decode_attention
from benchmarks.cuda import memory as cuda_memory
from benchmarks.cuda import steps as cuda_steps
from benchmarks.harness import records, stored
from benchmarks.harness.measure import Case
from benchmarks.report import tables, tables_gpu
from benchmarks.speed import scoring
from tests.helpers.benchmark_cases import TINY


def test_tables_without_results_say_so(results: Path) -> None:
    for name in tables_gpu.TABLES:
        assert tables.TABLES[name]() == tables_gpu.NOT_MEASURED


def test_tables_of_a_small_run(no_device: None, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"seconds": 2.0, "compilation_seconds": 1.0, "compiled_ahead": 3, "kernels": 3}
    monkeypatch.setattr(cold_start, "in_process", lambda *_: first)
    target = {(2, 70, 2): {"SDPA bf16 / turbo3": 3.2}}
    made: dict[str, Iterator[Case]] = {
        "decode_attention_cuda": iter(decode_attention.attention_cases(((2, 70, 2), (1, 64, 3)), target)),
        "cold_start_cuda": cold_start.cold_cases(TINY, 24, 30.0),
        "calls_cuda": calls.call_cases(TINY, 30, 3, (200,), 5, 3),
        "extension_cuda": cuda_steps.step_cases(TINY, 40, (1,), ("exact", "turbo3", "paper")),
        "extension_memory_cuda": cuda_memory.extension_cases(TINY, 8, 70, (1,), ("turbo2",), at_most=0.02),
        "scoring_12_on_500_cuda": scoring.candidate_cases(
            None, target_residues=40, candidate_residues=2, full_candidates=1, cached_candidates=1,
            refreshes=(0, 8, 32), at_least=1.0,
        ),
    }  # fmt: skip
    monkeypatch.setattr(run.Settings, "cases", lambda self, name: made[name])
    monkeypatch.setattr(records, "device_name", lambda device: "a device")
    assert run.run_in_turn(list(made), run.Settings(repeats=2, save=True)) == 0
    assert [path.name for path in results.iterdir()] == ["gpu.jsonl"]
    stored.forget()
    monkeypatch.setattr(tables_gpu, "_OVERVIEW", ("2 x 70, 2",))
    for name in tables_gpu.TABLES:
        text = tables.TABLES[name]()
        for word in ("commit", "torch", "transformers", "triton", "a device", "gpu.jsonl"):
            assert word in text, name
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1, name
