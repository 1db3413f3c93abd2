"""The tables of attacks and of killed processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attack.__main__ import KINDS
from benchmarks.attack.engines import ENGINES
from benchmarks.harness import records, stored
from benchmarks.report import tables_attack


def test_the_newest_attack_of_an_hour_is_shown_with_every_kind_of_trial(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "device_name", lambda device: "a processor")
    for seconds, trials in ((3600.0, 1), (3600.0, 2000), (60.0, 3)):
        figures = {
            "seconds": seconds, "seed": 7, "workers": 2, "command": "it",
            "trials": {"kills": trials, "text": 4}, "trials_total": trials + 4,
            "findings": {"text": {"hang": 1, "traceback": 2}}, "findings_total": 3, "quoted": {},
        }  # fmt: skip
        records.append(results / "attack.jsonl", "attack", figures, model="esm2-mini")
    stored.forget()
    lines = tables_attack.attack().splitlines()
    assert lines[2] == "| a command killed at one of its operations on files, and run again | 2,000 | 0 |"
    assert "| FASTA, CSV and other text damaged | 4 | 3 |" in lines
    assert "| a calibration damaged | 0 | 0 |" in lines
    assert "| all | 2,004 | 3 |" in lines
    assert any(line.startswith("`make attack SECONDS=3600 SEED=7 JOBS=2`") for line in lines)


def test_every_kind_of_trial_and_engine_has_words() -> None:
    assert tables_attack._TRIED.keys() == {*KINDS, *tables_attack._FORMER}
    assert tables_attack._KILLED.keys() == set(ENGINES)


def test_kills_of_all_runs_are_added(results: Path) -> None:
    counts = {"trials": 2, "kills": 3, "findings": 0, "seconds": 1.0}
    one = {"workers": {"embed": counts, "embed h5": counts}, "shards": {"store": counts | {"findings": 1}}}
    for seed, by_engine in ((1, one), (1, one), (2, {"ray driver": {"score": counts}}), (2, one)):
        figures = {"seed": seed, "command": f"campaign {seed}", "by_engine": by_engine}
        records.append(results / "kills.jsonl", "kills", figures, model="esm2-mini")
    stored.forget()
    lines = tables_attack.kills().splitlines()
    # The second run of the same seed and engines replaces the first.
    assert lines[2:6] == [
        "| `--workers`: a worker | `embed` | 8 | 12 | 0 |",
        "| `--shard`: a shard | `store` | 4 | 6 | 2 |",
        "| `--engine ray`: the process that started the run | `score` | 2 | 3 | 0 |",
        "| all |  | 14 | 21 | 2 |",
    ]
    assert lines[7].startswith("`campaign 1`; `campaign 2`; `campaign 2`. Measured with esm2-mini in float32")
