"""Time and memory of calibration."""

from __future__ import annotations

from benchmarks.speed import calibration
from tests.helpers.benchmark_cases import measured


def test_partial_fit_is_compared_with_forward_passes() -> None:
    whole, single = calibration.time_cases(proteins=2, toks_per_batch=(4096, 0))
    assert (whole.name, single.name) == ("time, batches of 4096 tokens", "time, one protein a batch")
    assert (whole.shape["batches"], single.shape["batches"]) == (1, 2)
    figures = measured(single, 1)
    assert figures["ratios"].keys() == {"partial_fit / forward"}


def test_memory_is_that_of_fresh_processes(monkeypatch) -> None:
    peaks = {2: {"loaded": 10, "partial_fit": 20, "finalize": 30}, 8: {"loaded": 10, "partial_fit": 22, "finalize": 60}}
    calls = []

    def in_process(module: str, proteins: int, residues: int) -> dict:
        calls.append((module, residues))
        return {"sequences": proteins, "bytes": peaks[proteins]}

    monkeypatch.setattr(calibration, "in_process", in_process)
    [case] = calibration.memory_cases(proteins=(2, 8), residues=50)
    assert measured(case)["growth"] == {"partial_fit": 1.1, "finalize": 2.0}
    assert calls == [("benchmarks.speed.calibration", 50)] * 2
