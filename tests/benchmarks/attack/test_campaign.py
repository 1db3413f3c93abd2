"""The campaign of kills as a program: whose turn it is, what it says of findings, and its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attack import campaign
from benchmarks.attack.engines import Trial
from benchmarks.attack.trial import Finding
from benchmarks.harness import records


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Every other trial kills two processes and finds something; returns what was run."""
    run: list[tuple[str, str, str]] = []

    def fake(engine: str, task: str, seed: str, root: Path, cluster: None) -> Trial:
        run.append((engine, task, seed))
        return Trial(2, [Finding("missing", "out/a\nout/b")]) if len(run) % 2 else Trial()

    monkeypatch.setattr(campaign, "run_trial", fake)
    monkeypatch.setattr(campaign, "turbo", lambda: None)
    return run


def test_engines_and_tasks_take_turns_until_enough_were_killed(
    trials: list[tuple[str, str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kills.jsonl"
    options = ["--engines", "workers", "shards", "--tasks", "embed", "store", "--seed", "7"]
    assert campaign.main([*options, "--kills", "5", "--out", str(out)]) == 1
    assert [one[:2] for one in trials] == [
        ("workers", "embed"), ("shards", "embed"), ("workers", "store"), ("shards", "store"), ("workers", "embed"),
    ]  # fmt: skip
    # No two trials have the same moments.
    assert len({seed for *_, seed in trials}) == 5
    [row] = records.read(out, "kills")
    figures = row["figures"]
    assert (figures["trials"], figures["kills"], figures["findings"]) == (5, 6, 3)
    counts = figures["by_engine"]["workers"]["embed"]
    assert (counts["trials"], counts["kills"], counts["findings"]) == (2, 4, 2)
    assert figures["command"].startswith("python -m benchmarks.attack.campaign --engines workers shards")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "6 killed in 5 trials, 3 findings"
    assert figures["quoted"][1] in lines
    # The command of a finding repeats its trial.
    again = figures["quoted"][1].partition(" | python -m benchmarks.attack.campaign ")[2].split()
    trials.clear()
    assert campaign.main(again) == 1
    assert [one[:2] for one in trials] == [("workers", "store")] and len(records.read(out)) == 1


def test_unknown_engines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        campaign.main(["--engines", "slurm"])
    assert "invalid choice: 'slurm'" in capsys.readouterr().err
