"""The stored results: every row belongs to a commit, but for a list of old ones that only shrinks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.harness import records

KNOWN = Path(records.RESULTS) / "local_changes.txt"
LAST_DATE = "2026-11-24T00:00:00"
"""Rows measured later must belong to a commit."""


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


def test_only_the_listed_old_rows_were_measured_with_local_changes() -> None:
    listed = KNOWN.read_text("utf-8").splitlines()
    found, known = Counter(of_changed_sources(records.RESULTS)), Counter(listed)
    assert sorted(found - known) == [], "commit first, then measure again"
    assert sorted(known - found) == [], f"no longer there: take them out of {KNOWN.name}"
    assert max(row.split("  ")[1] for row in listed) < LAST_DATE, "the list is of old rows only"


@pytest.mark.parametrize("revision", [None, {"commit": "0" * 40, "dirty": True}])
def test_a_row_of_local_changes_is_found(results: Path, monkeypatch: pytest.MonkeyPatch, revision: object) -> None:
    monkeypatch.setattr(records, "_revision", lambda: revision)
    records.append(results / "cpu.jsonl", "speed", {"benchmark": "short_contexts", "case": "all"})
    [row] = of_changed_sources(results)
    assert row.startswith("cpu.jsonl  2") and row.endswith("  short_contexts all")
    assert row.split("  ")[1] > LAST_DATE
