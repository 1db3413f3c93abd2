"""Long proteins in windows."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import long_proteins
from benchmarks.harness import embedded
from esm_turbo.tasks.embedding.windows import Windows
from tests.helpers.benchmark_cases import measured


def test_windows_are_compared_with_the_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_proteins, "evaluation_set", lambda name, most: embedded.evaluation_set("paper_six")[1:2])
    plain, memory = long_proteins.accuracy_cases([Windows(64, 16, 0), Windows(64, 16, 32)], ("exact",))
    assert (plain.name, memory.name) == (
        "window 64, overlap 16, memory none",
        "window 64, overlap 16, memory 32 as exact",
    )
    found = [measured(case) for case in (plain, memory)]
    residues = len(embedded.evaluation_set("paper_six")[1].sequence)
    for figures in found:
        assert figures["against_full"]["tokens"] == residues
    assert found[1]["against_full"]["cosine_mean"] > found[0]["against_full"]["cosine_mean"]


def test_peaks_are_those_of_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_process(module: str, residues: int, *cut: int) -> dict:
        assert (module, cut) == ("benchmarks.accuracy.long_proteins", (511, 64, 511))
        return {"loaded": 5, "peak": 10 * residues, "output": 4 * residues, "seconds": 2.0}

    monkeypatch.setattr(long_proteins, "in_process", in_process)
    [case] = long_proteins.process_cases(Windows(511, 64, 511), residues=(100, 150))
    figures = case.measure(1)
    assert figures["bytes_without_output"] == {"100": 600, "150": 900}
    assert figures["growth"] == {"peak without the output": 1.5}
    assert figures["residues_per_second"] == {"100": 50.0, "150": 75.0}
