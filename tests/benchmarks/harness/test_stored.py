"""The newest stored records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import records, stored


def accuracy_row(name: str, cosine: float, **changes: Any) -> dict[str, Any]:
    preset = {"name": name, "leave_one_out": {"cosine": cosine}, "extend": [], **changes}
    return {"proteins": "some.fasta", "preset": preset}


def test_the_newest_record_of_every_key(results: Path) -> None:
    for size, figure in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        records.append(results / "memory.jsonl", "memory", {"size": size, "figure": figure})
    found = stored.newest("memory", lambda figures: None if figures["size"] == "c" else figures["size"])
    assert {key: record["figures"]["figure"] for key, record in found.items()} == {"a": 3, "b": 2}
    assert list(found) == ["a", "b"]


def test_another_file_may_have_the_records(results: Path) -> None:
    records.append(results / "gpu.jsonl", "speed", {"x": 1})
    assert len(stored.newest("speed", lambda figures: "x", "gpu")) == 1
    with pytest.raises(LookupError, match=r"benchmarks/results/memory.jsonl holds no records of memory"):
        stored.newest("memory", lambda figures: "x")


def test_accuracy_of_a_preset_with_a_part(results: Path) -> None:
    path = results / "accuracy.jsonl"
    for row in (
        accuracy_row("turbo3", 0.1),
        accuracy_row("turbo3", 0.2),
        accuracy_row("paper", 0.4, leave_one_out=None),
        accuracy_row("turbo3", 0.5) | {"proteins": "others.fasta"},
    ):
        records.append(path, "accuracy", row)
    found = stored.accuracies("some")
    assert {name: record["figures"]["preset"]["leave_one_out"] for name, record in found.items()} == {
        "turbo3": {"cosine": 0.2}
    }
    assert stored.accuracy("some", "turbo3") is found["turbo3"]
    with pytest.raises(LookupError, match="no record of paper on some with leave_one_out"):
        stored.accuracy("some", "paper")
    assert stored.accuracies("some", "extend") == {}
