"""The table of the service under load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import records, stored
from benchmarks.report import tables_serving
from benchmarks.serve import __main__ as load


def _figures(command: str, rate: float, clients: int = 64) -> dict[str, Any]:
    targets = {name: {"found": 0, "at_most": 0, "met": True} for name in tables_serving._ROWS}
    targets["throughput / the library's"] = {"found": rate, "at_least": 0.8, "met": rate >= 0.8}
    return {
        "command": command, "clients": clients, "contexts": 200, "dtype": "float32", "load": {"seconds": 120.4},
        "targets": targets,
    }  # fmt: skip


def test_the_newest_run_on_each_device_is_shown_and_a_missed_target_is_bold(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "device_name", lambda device: f"a {device}")
    for command, device, rate, clients in (
        ("old", "cpu", 0.1, 64),
        ("new", "cpu", 1.25, 64),
        ("small", "cpu", 0.3, 8),
        ("on --device cuda", "cuda", 0.5, 64),
    ):
        records.append(
            results / "serve.jsonl", "serve", _figures(command, rate, clients), model="esm2-mini", device=device
        )
    stored.forget()
    text = tables_serving.serving()
    lines = text.splitlines()
    assert lines[0] == "| what | a cpu, float32 | a cuda, float32 | asked |"
    assert lines[2] == "| requests per second, against one call of the library each | 1.25 | **0.50** | at least 0.8 |"
    assert "| errors among the answers | 0 | 0 | 0 |" in lines
    assert "`new`: esm2-mini, 64 clients on 200 contexts for 120 s" in text
    assert "small" not in text


def test_every_target_of_the_benchmark_is_a_row() -> None:
    figures = {
        "load": {"ratio": 1.0, "errors": 0, "worst_difference": 0.0},
        "quarter": {"ratio": 1.0, "errors": 0, "worst_difference": 0.0},
        "malformed": {"not_4xx": 0, "traceback": False, "grown_bytes": 0},
        "kill": {"lost": 0, "damaged": 0, "errors": 0, "worst_difference": 0.0, "exit_code": 0},
        "dtype": "float32",
    }
    assert load._targets(figures, load._options([])).keys() == tables_serving._ROWS.keys()
