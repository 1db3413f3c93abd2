"""The stored results: every row belongs to a commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import records


def of_changed_sources(folder: Path) -> list[str]:
    """Rows measured with sources that differed from their commit, or with none: file, date and name."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for record in records.read(path):
            if record["revision"] is None or record["revision"]["dirty"]:
                figures = record["figures"]
                name = [figures.get("benchmark", record["kind"]), figures.get("case")]
                found.append("  ".join([path.name, record["date"], " ".join(filter(None, name))]))
    return found


def test_no_row_was_measured_with_local_changes() -> None:
    assert of_changed_sources(Path(records.RESULTS)) == [], "commit first, then measure again"


@pytest.mark.parametrize("revision", [None, {"commit": "0" * 40, "dirty": True}])
def test_a_row_of_local_changes_is_found(results: Path, monkeypatch: pytest.MonkeyPatch, revision: object) -> None:
    monkeypatch.setattr(records, "_revision", lambda: revision)
    records.append(results / "cpu.jsonl", "speed", {"benchmark": "short_contexts", "case": "all"})
    [row] = of_changed_sources(results)
    assert row.startswith("cpu.jsonl  2") and row.endswith("  short_contexts all")
