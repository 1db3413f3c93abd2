"""Tables of screening."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import records
from benchmarks.report import tables_scoring


def test_a_table_uses_one_run_without_older_groups(results: Path) -> None:
    path = results / "screening.jsonl"
    for limit, spearman in ((8, 0.1), (None, 0.9)):
        for group in (1, 2):
            arms = {"full": {"ahead_of_shuffled": 0.5}, "frozen, masked, 8": {"spearman": spearman}}
            row = {
                "case": f"group {group} of 2",
                "shape": {"max_targets": limit},
                "targets_scored": [{"target": "x", "arms": arms}],
            }
            records.append(path, "screening", row)
    # Runs are told apart by their dates, which could be equal within a second.
    lines = path.read_text().splitlines()
    old = [line.replace('"date": "2', '"date": "1') for line in lines[:2]]
    path.write_text("\n".join([*old, *lines[2:]]) + "\n")
    assert len(tables_scoring.screening_records()) == 2
    assert tables_scoring.screened()["frozen, masked, 8"] == {"spearman": 0.9, "lowest_spearman": 0.9}
