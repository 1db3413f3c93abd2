"""Progress callbacks: reports of stages and of parts of a run."""

from __future__ import annotations

from esm_turbo.tasks.common.progress import Progress, StageProgress, part_of, silent


def test_a_stage_reports_running_totals() -> None:
    calls: list[tuple[str, int, int]] = []
    stage = StageProgress(lambda *call: calls.append(call), "embed", 5)
    assert calls == []
    for units in (0, 2, 3):
        stage.advance(units)
    assert calls == [("embed", 0, 5), ("embed", 2, 5), ("embed", 5, 5)]


def test_stages_count_independently() -> None:
    calls: list[tuple[str, int, int]] = []
    report: Progress = lambda *call: calls.append(call)  # noqa: E731 - the annotation is part of the test
    check, embed = StageProgress(report, "check", 2), StageProgress(report, "embed", 7)
    check.advance(1)
    embed.advance(7)
    check.advance(1)
    assert calls == [("check", 1, 2), ("embed", 7, 7), ("check", 2, 2)]


def test_without_a_callback_the_stage_still_counts() -> None:
    stage = StageProgress(None, "embed", 3)
    stage.advance(2)
    assert (stage.progress, stage.done) == (silent, 2)


def test_a_part_reports_as_the_whole() -> None:
    calls: list[tuple[str, int, int]] = []
    part_of(lambda *call: calls.append(call), start=10, total=30)("score", 4, 5)
    part_of(lambda *call: calls.append(call), stage="turbo")("score", 4, 5)
    part_of(lambda *call: calls.append(call), name="target 1, ")("score", 4, 5)
    part_of(None, stage="turbo")("score", 4, 5)
    assert calls == [("score", 14, 30), ("turbo", 4, 5), ("target 1, score", 4, 5)]
