"""Benchmarks of a CUDA device as far as a machine without one can run them, and the tables of their rows."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import run
from benchmarks.cuda import calls, cold_start, decode_attention
from benchmarks.harness import names, records, stored
from benchmarks.harness.measure import Case, Figures
from benchmarks.report import tables_gpu
from tests.helpers.benchmark_cases import TINY


def rows_of(results: Path, monkeypatch: pytest.MonkeyPatch, name: str, cases: list[Case]) -> list[Figures]:
    """The rows that a run of a benchmark saves; all its targets are judged."""
    monkeypatch.setattr(run.Settings, "cases", lambda *_: cases)
    monkeypatch.setattr(records, "device_name", lambda device: "a device")
    assert run.run_in_turn([name], run.Settings(repeats=2, save=True)) == 0
    stored.forget()
    rows = [record["figures"] for record in records.read(results / "gpu.jsonl")]
    assert [len(row["targets"]) for row in rows] == [len(case.targets) for case in cases]
    return rows


def check_table(name: str) -> None:
    text = tables_gpu.TABLES[name]()
    for word in ("commit", "torch", "transformers", "triton", "a device", "gpu.jsonl"):
        assert word in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_attention(no_device: None, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {(2, 70, 1): {"SDPA bf16 / turbo3": 3.2}}
    cases = list(decode_attention.attention_cases(((2, 70, 1), (1, 64, 3)), targets))
    assert [case.name for case in cases] == ["batch 2 x 70, 1 query", "batch 1 x 64, 3 queries"]
    rows = rows_of(results, monkeypatch, "decode_attention_cuda", cases)
    assert [len(row["targets"]) for row in rows] == [1, 0]
    for row in rows:
        assert {"SDPA bf16", *names.COMPRESSED} <= row["seconds"].keys()
        assert row["SDPA bf16 backend"] in row["SDPA bf16 seconds by backend"]
        rate = row["bytes"]["turbo2"] / row["seconds"]["turbo2"]["p50"] / 1e9
        assert row["GB/s"]["turbo2"] == pytest.approx(rate)
    assert rows[0]["bytes"]["SDPA bf16"] == 2 * 2 * 20 * 70 * 64 * 2
    assert rows[0]["bytes"]["paper"] == rows[0]["bytes"]["SDPA bf16"] // 4
    check_table("gpu_attention")


def test_calls(no_device: None, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, *reading, embedding = rows_of(
        results, monkeypatch, "calls_cuda", list(calls.call_cases(TINY, 30, 3, 200, 5, 3))
    )
    assert prefill["shape"]["context_tokens"] == 31
    assert prefill["seconds"].keys() == {"turbo.prefill", calls.THEIRS}
    assert [row["case"] for row in reading] == [
        "extend by 1 peptide",
        "extend by 64 peptides",
        "score 5 peptides",
        "score all variants of 30 residues",
        "generate after 1 context",
        "generate after 64 contexts",
        "generate in place in 1 protein",
        "generate in place in 8 proteins",
    ]
    for row in reading:
        count = row["shape"]["rows"] * row["shape"].get("new_tokens", 1)
        for arm, rate in row["per_second"].items():
            assert rate * row["seconds"][arm]["p50"] == pytest.approx(count)
    arm = "turbo.embed, mean"
    assert embedding["per_second"][arm] == embedding["shape"]["residues"] / embedding["seconds"][arm]["p50"]
    assert f"{arm} / turbo.embed, mean and caches" in embedding["ratios"]
    check_table("gpu_calls")


def test_calls_without_graphs() -> None:
    turbo = SimpleNamespace(model=SimpleNamespace(esm=SimpleNamespace(captures=True)))
    with pytest.raises(KeyError), calls.without_graphs(turbo):
        assert not turbo.model.esm.captures
        raise KeyError
    assert turbo.model.esm.captures


def test_first_calls(no_device: None, results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", ""))
    called = []
    monkeypatch.setattr(cold_start, "everyday_calls", called.append)
    sizes = (TINY.num_layers, TINY.num_heads, TINY.head_dim, TINY.intermediate_size)
    figures = cold_start.main(str(tmp_path / "kernels"), sizes)
    assert len(called) == 1
    # Nothing is compiled on a CPU.
    assert figures["kernels"] == figures["compiled_ahead"] == 0
    monkeypatch.setattr(cold_start, "in_process", lambda *_: figures)
    [row] = rows_of(results, monkeypatch, "cold_start_cuda", list(cold_start.cold_cases(TINY, 24, 30.0)))
    assert row["seconds"].keys() == {cold_start.COLD, cold_start.WARM}
    assert all(target["met"] for target in row["targets"])
    check_table("gpu_cold_start")
