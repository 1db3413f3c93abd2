"""The benchmarks of CUDA devices as far as a machine without one can run them: groups, rows, and tables of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import run
from benchmarks.cuda import compile_ahead, decode_attention, peers
from benchmarks.cuda import memory as cuda_memory
from benchmarks.cuda import prefill as cuda_prefill
from benchmarks.cuda import steps as cuda_steps
from benchmarks.cuda import validation as cuda_validation
from benchmarks.harness import cuda_timing, gpu_models, names, records, stored
from benchmarks.harness.measure import Case, Check, Target
from benchmarks.harness.models import Architecture
from benchmarks.registry import BENCHMARKS, GPU_BENCHMARKS, TIMED
from benchmarks.report import tables, tables_gpu
from benchmarks.speed import scoring
from esm_turbo.ops import torch_ops, triton_encode
from esm_turbo.ops import triton_attention as triton_kernels
from esm_turbo.ops.backends import TritonBackend

TINY = Architecture("tiny", num_layers=2, num_heads=2, head_dim=32, intermediate_size=64)


def timed(arms: Mapping[str, Callable[[], object]], repeats: int, **options: Any) -> tuple[dict, dict]:
    """In the place of the clocks of a device: runs every arm, and says that it took a millisecond for each letter."""
    times, failed = {}, {}
    for name, arm in arms.items():
        try:
            arm()
            times[name] = [len(name) / 1e3] * repeats
        except Exception as error:
            failed[name] = cuda_timing.reason(error)
    return times, failed


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks run on the CPU, PyTorch's path in the kernels' place."""
    monkeypatch.setattr(cuda_timing, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_timing, "available", lambda: True)
    monkeypatch.setattr(cuda_timing, "captured_seconds", timed)
    monkeypatch.setattr(cuda_timing, "synchronized_seconds", timed)
    monkeypatch.setattr(cuda_timing, "copy_speed", lambda repeats: 4e12)
    monkeypatch.setattr(compile_ahead, "compile_all", lambda jobs: list(jobs))
    monkeypatch.setattr(triton_kernels, "extend_attention", torch_ops.extend_attention)
    monkeypatch.setattr(TritonBackend, "extend_attention", staticmethod(torch_ops.extend_attention))
    nothing = {"synchronize": None, "memory_allocated": 1000, "memory_reserved": 3000, "max_memory_allocated": 1500}
    for name, value in nothing.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=10**9))
    gpu_models.calibrated.cache_clear()
    yield
    gpu_models.calibrated.cache_clear()


def measured(case: Case, repeats: int = 2) -> dict[str, Any]:
    check = case.check()
    assert check.passed, check
    figures = case.measure(repeats)
    assert isinstance(figures, dict)
    for target in case.targets:
        target.judge(figures)
    json.dumps([figures, dict(case.shape)], allow_nan=False)
    return figures


def test_the_group_of_cuda_devices_is_apart() -> None:
    assert run.GROUPS["gpu"] is GPU_BENCHMARKS
    assert not GPU_BENCHMARKS.keys() & BENCHMARKS.keys()
    assert all(name.endswith("_cuda") for name in GPU_BENCHMARKS)
    assert not any(name.endswith("_cuda") for name in BENCHMARKS)
    assert TIMED.keys() == GPU_BENCHMARKS.keys() | BENCHMARKS.keys()
    settings = run.Settings(repeats=9, save=True)
    assert settings.file("prefill_cuda") == records.RESULTS / "gpu.jsonl"
    assert settings.file("import_time") == records.RESULTS / "cpu.jsonl"
    assert run.Settings(repeats=50).repeats_of("scoring_12_on_500_cuda") == 2
    assert run.Settings(repeats=50).repeats_of("import_time") == 50


@pytest.mark.parametrize("name", GPU_BENCHMARKS)
def test_there_are_no_rows_without_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(GPU_BENCHMARKS[name].cases()) == []


def test_attention(no_device: None) -> None:
    targets = {(2, 70, 1): {"SDPA bf16 / turbo3": 3.2}}
    seen: list[Any] = []
    shapes = ((2, 70, 1), (1, 64, 3))
    cases = list(decode_attention.attention_cases(shapes, targets, ahead=seen.append))
    assert seen == [shapes]
    assert [case.name for case in cases] == ["batch 2 x 70, 1 query", "batch 1 x 64, 3 queries"]
    assert [len(case.targets) for case in cases] == [1, 0]
    # The paper's kernel needs a device.
    cases[0] = Case(cases[0].name, "", cases[0].shape, lambda: Check("", 0.0, 0.0), cases[0].measure, cases[0].targets)
    figures = [measured(case) for case in cases]
    for row in figures:
        assert {"SDPA bf16", "SDPA fp32", *names.COMPRESSED} <= row["seconds"].keys()
        assert row["SDPA bf16 backend"] in row["SDPA bf16 seconds by backend"]
        assert row["GB/s"]["copy"] == pytest.approx(4000)
        rate = row["bytes"]["turbo2"] / row["seconds"]["turbo2"]["p50"] / 1e9
        assert row["GB/s"]["turbo2"] == pytest.approx(rate)
    assert names.PAPER_KERNEL in figures[0]["failed"]
    assert figures[0]["bytes"]["SDPA bf16"] == 2 * 2 * 20 * 70 * 64 * 2
    assert figures[0]["bytes"]["paper"] == figures[0]["bytes"]["SDPA bf16"] // 4


def test_what_is_compiled_ahead_runs(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[compile_ahead.Job] = []
    encoded: list[int] = []
    monkeypatch.setattr(compile_ahead, "compile_all", done.extend)
    monkeypatch.setattr(triton_encode, "encode", lambda codec, layer_idx, keys, *_, **__: encoded.append(keys.shape[2]))
    compile_ahead.embedded([(3, 70, 1), (1, 70, 1)])
    # Two rows at which the first is checked, and its own three; the second is checked as it is.
    assert len(done) == 3 * len(names.COMPRESSED)
    models = gpu_models.presets_of(TINY, ["exact", "turbo3", "paper"])
    compile_ahead.model([model.codec(model.turbo_config) for model in models.values()], [(1, 40, 0), (1, 40, 2)])
    for job in done:
        compile_ahead._compile(job)
    assert encoded and set(encoded) == {40}
    assert {job.shape for job in done} == {(2, 70, 1), (3, 70, 1), (1, 70, 1), (1, 40, 0), (1, 40, 2)}


def test_prefill_and_encoding(no_device: None) -> None:
    target = Target(("ratios", "encode turbo3, captured / forward"), at_most=0.06)
    [case] = cuda_prefill.prefill_cases(TINY, (40,), ("turbo3", "paper"), {40: [target]})
    figures = measured(case)
    assert "failed" not in figures
    arms = ["forward", *(f"{what} {preset}" for preset in ("turbo3", "paper") for what in ("prefill", "encode"))]
    assert figures["seconds"].keys() == {f"{arm}, {kind}" for arm in arms for kind in ("eager", "captured")}
    assert figures["overhead_seconds"]["turbo3, eager"] == pytest.approx(7e-3)


def test_encoding_alone_makes_what_a_prefill_stores(no_device: None) -> None:
    ids = gpu_models.tokens(1, 38, eos=True, seed=3)
    [model] = gpu_models.presets_of(TINY, ["turbo3"]).values()
    encode = cuda_prefill.encoding(model, ids)
    encode()
    cache = model.new_cache()
    cache.commit(encode())
    expected = cuda_memory.prefilled(model, ids)
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        assert all(torch.equal(mine.packed[name], theirs.packed[name]) for name in theirs.packed)


def test_extension_steps(no_device: None) -> None:
    presets = ("exact", "turbo3", "paper")
    cases = list(cuda_steps.step_cases(TINY, 40, (3, 1), presets, at_most=2e-3))
    assert [case.name for case in cases] == ["3 on 40", "1 on 40"]
    for case in cases:
        check = case.check()
        assert check.passed
        figures = case.measure(2)
        assert {"recompute, eager", "extend turbo3, eager", "extend exact, eager"} <= figures["seconds"].keys()
        # Nothing can be captured here.
        assert {"recompute, captured", "extend turbo3, captured"} <= figures["failed"].keys()
        assert figures["ratios"].keys() == {f"recompute, eager / extend {preset}, eager" for preset in presets}
        judged = [target.judge(figures) for target in case.targets]
        assert [(one["found"], one["met"]) for one in judged] == [(None, False)] * 2


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


def test_memory(no_device: None) -> None:
    [case] = cuda_memory.extension_cases(TINY, 16, 100, (1, 4), ("turbo2",), at_most=0.02)
    figures = measured(case)
    assert figures["bytes"]["extra"] == {"1": 500, "4": 500}
    assert figures["part_of_cache"]["1"] == 500 / figures["bytes"]["packed"]
    # 2 bits an element and 16 x 100 tokens, within what the preset's groups round to.
    assert figures["bytes"]["packed"] == pytest.approx(16 * 100 * 2 * 2 * 2 * 32 * 2 / 8, rel=0.3)
    [case] = cuda_memory.size_cases(TINY, 100, ("exact", "turbo2"))
    figures = measured(case)
    assert figures["bytes"]["stored"]["exact"] > figures["bytes"]["stored"]["turbo2"]


@pytest.mark.parametrize("stopped_by", ["memory", "time"])
def test_resident_contexts(stopped_by: str, no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10**9] * 3 + [0] * 10 if stopped_by == "memory" else [10**9] * 50)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 10**9))
    seconds = 60.0 if stopped_by == "memory" else 0.35
    [case] = cuda_memory.resident_cases(TINY, "turbo2", 30, 4, spare=10**6, seconds=seconds, at_least=10)
    used = iter(range(1000, 10**6, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(used))
    if stopped_by == "time":
        clock = iter(range(100))
        monkeypatch.setattr(cuda_memory.time, "perf_counter", lambda: 0.1 * next(clock))
    figures = measured(case)
    assert figures["stopped_by"] == stopped_by
    assert figures["contexts"] == figures["distinct_token_sequences"] == 12
    assert figures["read_again"] == {"batches": 3, "largest_difference": 0.0}
    assert ("contexts_extrapolated" in figures) == (stopped_by == "time")


def test_peers_that_are_missing_are_named(no_device: None) -> None:
    [case] = peers.peer_cases(((1, 64, 1),))
    figures = measured(case)
    assert {"turbo4, captured", "turbo3, eager"} <= figures["seconds"].keys()
    missing = [name for name in names.PACKAGES if case.shape["versions"][names.PACKAGES[name]] is None]
    assert set(missing) <= figures["failed"].keys()


def test_a_case_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def good(name: str) -> Case:
        return Case(name, "m", {"device": "cpu"}, lambda: Check("", 0.0, 0.0), lambda repeats: {"x": repeats})

    def broken() -> Check:
        raise torch.OutOfMemoryError("no room")

    def cases(self: run.Settings, name: str) -> Iterator[Case]:
        yield good("first")
        yield Case("broken", "m", {}, broken, lambda repeats: {})
        yield good("last")
        if name == "prefill_cuda":
            raise RuntimeError("cannot go on")

    monkeypatch.setattr(run.Settings, "cases", cases)
    out = tmp_path / "gpu.jsonl"
    assert run.run_in_turn(["prefill_cuda", "peers_cuda"], run.Settings(repeats=2, out=out)) == 3
    assert [row["figures"]["case"] for row in records.read(out)] == ["first", "last"] * 2
    text = capsys.readouterr().err
    assert text.count("broken: FAILED") == 2 and "cannot go on" in text
    assert run.run_in_turn(["prefill_cuda"], run.Settings(seconds=-1.0)) == 1
    assert "STOPPED after" in capsys.readouterr().err


def test_a_copy_without_history_names_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "source_revision", lambda: None)
    monkeypatch.delenv(records.REVISION_VARIABLE, raising=False)
    assert records.append(tmp_path / "r", "speed", {})["revision"] is None
    monkeypatch.setenv(records.REVISION_VARIABLE, "abc dirty")
    assert records.append(tmp_path / "r", "speed", {})["revision"] == {"commit": "abc", "dirty": True}
    monkeypatch.setenv(records.REVISION_VARIABLE, "abc")
    assert records.append(tmp_path / "r", "speed", {})["revision"] == {"commit": "abc", "dirty": False}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of results in the place of the project's."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    stored.forget()
    yield tmp_path
    stored.forget()


def test_tables_say_that_nothing_was_measured(results: Path) -> None:
    for name in tables_gpu.TABLES:
        assert tables.TABLES[name]() == tables_gpu.NOT_MEASURED


def test_tables_of_a_small_run(no_device: None, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10**9] * 3 + [0] * 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 10**9))
    target = {(2, 70, 2): {"SDPA bf16 / turbo3": 3.2}}
    made: dict[str, Iterator[Case]] = {
        "decode_attention_cuda": iter(decode_attention.attention_cases(((2, 70, 2), (1, 64, 3)), target)),
        "prefill_cuda": cuda_prefill.prefill_cases(TINY, (32, 40), ("turbo3", "paper"), {}),
        "extension_cuda": cuda_steps.step_cases(TINY, 40, (1,), ("exact", "turbo3", "paper")),
        "extension_memory_cuda": cuda_memory.extension_cases(TINY, 8, 70, (1,), ("turbo2",), at_most=0.02),
        "cache_bytes_cuda": cuda_memory.size_cases(TINY, 70, ("exact", "paper", "turbo2")),
        "kernel_validation_cuda": cuda_validation.kernel_cases(TINY, 70, (1,), ("turbo3",)),
        "prefill_similarity_cuda": cuda_validation.similarity_cases(TINY, (30,), "turbo3"),
        "decode_path_cuda": cuda_validation.decode_cases(TINY, (70,), ("paper", "turbo3")),
        "resident_contexts_cuda": cuda_memory.resident_cases(TINY, "turbo2", 30, 4, 10**6, 60.0, 10),
        "peers_cuda": peers.peer_cases(((1, 64, 2),)),
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
    for name in tables_gpu.TABLES.keys() - {"gpu_profile", "gpu_tests"}:
        text = tables.TABLES[name]()
        for word in ("commit", "torch", "transformers", "triton", "a device", "gpu.jsonl"):
            assert word in text, name
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1, name
    asked = tables_gpu.TABLES["gpu_targets"]()
    assert "| decode attention: batch 2 x 70, 2 queries | SDPA bf16 / turbo3 | at least 3.2 | 1.5 | **no** |" in asked
    # The worst of many cases stands for all.
    monkeypatch.setattr(tables_gpu, "_MANY_CASES", 1)
    stored_rows = records.read(results / "gpu.jsonl")
    errors = [
        row["figures"]["ratios"]["error / SDPA's error"]
        for row in stored_rows
        if row["figures"]["benchmark"] == "kernel_validation_cuda"
    ]
    assert len(errors) == 2
    [row] = [line for line in tables_gpu.TABLES["gpu_targets"]().splitlines() if "kernel validation" in line]
    assert "worst of 2 |" in row
    assert f"| {max(errors):.3g} |" in row
    pages = [(tables.ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/performance.md")]
    assert {f"<!-- table {name} -->" for name in tables_gpu.TABLES} <= set("\n".join(pages).splitlines())
