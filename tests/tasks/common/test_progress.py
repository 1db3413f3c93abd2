"""Progress callbacks: reports of parts of a run."""

from __future__ import annotations

from typing import Any

from esm_turbo.tasks.common.progress import part_of


def test_a_part_reports_as_the_whole() -> None:
    calls: list[tuple[str, int, int]] = []

    def watch(*call: Any) -> None:
        calls.append(call)

    for part in (
        part_of(watch, start=10, total=30),
        part_of(watch, stage="turbo"),
        part_of(watch, name="target 1, "),
    ):
        assert part is not None
        part("score", 4, 5)
    assert calls == [("score", 14, 30), ("turbo", 4, 5), ("target 1, score", 4, 5)]


def test_a_run_that_nobody_watches_has_no_parts_that_call() -> None:
    assert part_of(None, stage="turbo", start=10) is None
