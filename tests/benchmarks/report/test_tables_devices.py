"""Tables of several devices, and of killed processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attack.engines import ENGINES
from benchmarks.harness import records, stored
from benchmarks.report import tables_devices


def test_every_number_of_devices_is_shown_with_its_newest_run(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "device_name", lambda device: "NVIDIA H200")
    each = {"embed": 2000, "score": 16, "store": 500}
    for names, geometry, proteins, speedup in (
        (["cuda:0", "cuda:1"], [33, 1280, 20], each, 1.0),
        (["cpu", "cpu"], None, dict.fromkeys(each, 60), 1.5),
        (["cuda:0", "cuda:1"], [33, 1280, 20], each, 1.95),
        (["cuda:0", "cuda:1", "cuda:2", "cuda:3"], [33, 1280, 20], each, 3.75),
    ):
        figures = {
            "devices": names, "dtype": "bfloat16", "geometry": geometry, "proteins": proteins,
            "seconds": {task: [10.0, 10 / speedup] for task in ("embed", "score", "store")},
            "speedup": dict.fromkeys(("embed", "score", "store"), speedup),
        }  # fmt: skip
        records.append(results / "devices.jsonl", "devices", figures)
    stored.forget()
    lines = tables_devices.devices().splitlines()
    random = "random weights, 33 layers of 1,280 in 20 heads | bfloat16"
    counts = "1.95x (2,000 proteins, 10.0 s) | 1.95x (16 proteins, 10.0 s) | 1.95x (500 proteins, 10.0 s)"
    assert lines[2] == f"| 2 x NVIDIA H200 | {random} | {counts} |"
    assert lines[3].startswith("| 2 workers on ") and "| esm2-mini | bfloat16 | 1.50x (60 proteins, " in lines[3]
    assert lines[4].startswith(f"| 4 x NVIDIA H200 | {random} | 3.75x") and len(lines) == 7
    assert lines[6].endswith("`benchmarks/results/devices.jsonl`.")


def test_kills_of_all_runs_are_added(results: Path) -> None:
    counts = {"trials": 2, "kills": 3, "findings": 0, "seconds": 1.0}
    one = {"workers": {"embed": counts, "embed h5": counts}, "shards": {"store": counts | {"findings": 1}}}
    for seed, by_engine in ((1, one), (1, one), (2, {"ray driver": {"score": counts}}), (2, one)):
        figures = {"seed": seed, "command": f"campaign {seed}", "by_engine": by_engine}
        records.append(results / "kills.jsonl", "kills", figures, model="esm2-mini")
    stored.forget()
    lines = tables_devices.kills().splitlines()
    # The second run of the same seed and engines replaces the first.
    assert lines[2] == "| `--workers`: a worker | `embed` | 8 | 12 | 0 |"
    assert lines[3] == "| `--shard`: a shard | `store` | 4 | 6 | 2 |"
    assert lines[4] == "| `--engine ray`: the process that started the run | `score` | 2 | 3 | 0 |"
    assert lines[5] == "| all |  | 14 | 21 | 2 |"
    assert lines[7].startswith("`campaign 1`; `campaign 2`; `campaign 2`. Measured with esm2-mini in float32")


def test_every_engine_has_words() -> None:
    assert tables_devices._KILLED.keys() == set(ENGINES)
