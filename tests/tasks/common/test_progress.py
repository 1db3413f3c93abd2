"""Progress callbacks: reports of parts of a run."""

from __future__ import annotations

from esm_turbo.tasks.common.progress import part_of


def test_a_part_reports_as_the_whole() -> None:
    calls: list[tuple[str, int, int]] = []
    part_of(lambda *call: calls.append(call), start=10, total=30)("score", 4, 5)
    part_of(lambda *call: calls.append(call), stage="turbo")("score", 4, 5)
    part_of(lambda *call: calls.append(call), name="target 1, ")("score", 4, 5)
    part_of(None, stage="turbo")("score", 4, 5)
    assert calls == [("score", 14, 30), ("turbo", 4, 5), ("target 1, score", 4, 5)]
