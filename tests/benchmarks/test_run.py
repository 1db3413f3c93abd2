"""The runner: rows and their commands, failures, groups, and arguments; and what the registry holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import run
from benchmarks.harness import records
from benchmarks.harness.measure import Case, Check
from benchmarks.registry import BENCHMARKS, EXPERIMENTS, GPU_BENCHMARKS, TIMED
from esm_turbo.config import COMPARISON_PRESETS, PRESETS, PRODUCT_PRESETS
from tests.helpers.benchmark_cases import empty_case


def test_a_row_has_the_command_that_reproduces_it_and_no_path(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    settings = run.Settings(repeats=3, threads=2, max_proteins=5, out=out)
    assert run.run_case("memory", empty_case(), settings) is not None
    assert run.run_case("short_contexts", empty_case(), settings) is not None
    [experiment, speed] = records.read(out)
    assert experiment["kind"] == "memory"
    assert experiment["model"] == "a model"
    assert experiment["figures"]["command"] == "python -m benchmarks.run memory --threads 2 --max-proteins 5"
    assert speed["kind"] == "speed"
    assert speed["figures"]["command"] == "python -m benchmarks.run short_contexts --threads 2 --repeats 3"
    assert speed["figures"]["repeats seen"] == 3
    assert str(tmp_path) not in out.read_text()


def test_a_case_may_give_several_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run.run_case("memory", empty_case(figures=[{"size": "8M"}, {"size": "35M"}]), run.Settings(out=out))
    assert rows is not None
    written = [record["figures"] for record in records.read(out, "memory")]
    assert [row["size"] for row in written] == [row["size"] for row in rows] == ["8M", "35M"]
    assert all(row["check"] == {"what": "nothing", "error": 0.0, "tolerance": 0.5} for row in written)


@pytest.mark.parametrize("error", [0.6, math.nan])
def test_a_case_that_fails_its_check_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: float
) -> None:
    out = tmp_path / "rows.jsonl"
    assert run.run_case("memory", empty_case(check=error), run.Settings(out=out)) is None
    assert "REFUSED" in capsys.readouterr().err
    assert not out.exists()


def test_rows_are_saved_in_the_file_of_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    settings = run.Settings(save=True)
    for name in ("accuracy_codecs", "windows", "short_contexts", "calls_cuda"):
        assert run.run_case(name, empty_case(), settings) is not None
    assert {path.name for path in tmp_path.iterdir()} == {"accuracy.jsonl", "windows.jsonl", "cpu.jsonl", "gpu.jsonl"}


def test_cases_are_chosen_by_text_in_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [dataclasses.replace(empty_case(), name=name) for name in ("prefill of 500", "embedding")]
    experiment = dataclasses.replace(EXPERIMENTS["memory"], cases=lambda _: cases)
    monkeypatch.setitem(EXPERIMENTS, "memory", experiment)
    settings = run.Settings(only="embed")
    assert [case.name for case in settings.cases("memory")] == ["embedding"]
    assert settings.command("memory").endswith("--cases embed")
    assert list(run.Settings().cases("memory")) == cases


def test_a_group_stands_for_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def no_cases(self: run.Settings, name: str) -> Iterator[Case]:
        seen.append((name, self.threads))
        return iter(())

    monkeypatch.setattr(run.Settings, "cases", no_cases)
    monkeypatch.setattr(run, "_prepare", lambda threads: None)
    assert run.main(["results", "--threads", "3"]) == 0
    assert seen == [(name, 3) for name in EXPERIMENTS]
    seen.clear()
    assert run.main([]) == 0
    assert seen == [(name, 2) for name in BENCHMARKS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "no such benchmark: nonsense"),
        (["memory", "--max-proteins", "0"], "must be at least 1"),
        (["memory", "--threads", "0"], "must be at least 1"),
        (["memory", "--save", "--out", "x"], "not allowed with"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_prepare", lambda threads: None)
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_case_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken() -> Check:
        raise torch.OutOfMemoryError("no room")

    def cases(self: run.Settings, name: str) -> Iterator[Case]:
        yield dataclasses.replace(empty_case(), name="first")
        yield dataclasses.replace(empty_case(), name="broken", check=broken)
        yield dataclasses.replace(empty_case(), name="last")
        if name == "e1_cuda":
            raise RuntimeError("cannot go on")

    monkeypatch.setattr(run.Settings, "cases", cases)
    out = tmp_path / "gpu.jsonl"
    assert run.run_in_turn(["e1_cuda", "calls_cuda"], run.Settings(repeats=2, out=out)) == 3
    assert [row["figures"]["case"] for row in records.read(out)] == ["first", "last"] * 2
    text = capsys.readouterr().err
    assert text.count("broken: FAILED") == 2 and "cannot go on" in text
    assert run.run_in_turn(["e1_cuda"], run.Settings(seconds=-1.0)) == 1
    assert "STOPPED after" in capsys.readouterr().err


def test_cuda_benchmarks_are_a_group_of_their_own() -> None:
    assert run.GROUPS["gpu"] is GPU_BENCHMARKS
    assert all(name.endswith("_cuda") for name in GPU_BENCHMARKS)
    assert not any(name.endswith("_cuda") for name in BENCHMARKS)
    assert TIMED.keys() == GPU_BENCHMARKS.keys() | BENCHMARKS.keys()
    assert run.Settings(repeats=50).repeats_of("calls_cuda") == 5
    assert run.Settings(repeats=50).repeats_of("short_contexts") == 50


@pytest.mark.parametrize("name", GPU_BENCHMARKS)
def test_there_are_no_cases_without_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(GPU_BENCHMARKS[name].cases()) == []


def test_accuracy_covers_every_preset_and_set_once() -> None:
    cases = {name: [case.name for case in EXPERIMENTS[name].cases(None)] for name in ("accuracy", "accuracy_codecs")}
    sets = ["cath_val200", "long_human"]
    assert cases["accuracy"] == sets
    assert cases["accuracy_codecs"] == [f"{proteins}, {preset}" for preset in COMPARISON_PRESETS for proteins in sets]
    assert set(PRESETS) == {*PRODUCT_PRESETS, *COMPARISON_PRESETS}
