"""Trials with killed processes notice what must not happen, and a few of them in short."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.attack import engines
from benchmarks.attack.engines import Killer, Moment, Trial, local_workers, run_trial
from benchmarks.attack.trial import Outcome, call
from esm_turbo.tasks.common.progress import StageProgress

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "undisturbed", lambda root, task: {"out/a": b"1", "out/b": b"2"})


@pytest.mark.parametrize(
    ("written", "category"),
    [
        ({"a": b"1", "b": b"2"}, None),
        ({"a": b"1", "b": b"3"}, "different"),
    ],
)
def test_what_differs_from_an_undisturbed_run_is_found(
    undisturbed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: dict[str, bytes], category: str | None
) -> None:
    def engine(rng: random.Random, folder: Path, task: str, cluster: None) -> Trial:
        (folder / "out").mkdir()
        for name, data in written.items():
            (folder / "out" / name).write_bytes(data)
        # Who looked for contexts how often differs.
        (folder / "out" / "usage.jsonl").write_text("")
        return Trial(kills=1)

    monkeypatch.setitem(engines.ENGINES, "fake", engine)
    trial = run_trial("fake", "embed", "0", tmp_path)
    assert [one.category for one in trial.findings] == ([] if category is None else [category])
    assert trial.kills == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("outcome", "category"), [((0, False), None), ((1, False), "exit"), ((-9, True), "hang")])
def test_how_a_run_ended(outcome: tuple[int, bool], category: str | None) -> None:
    trial = Trial()
    trial.check(Outcome(outcome[0], "", "a reason", outcome[1], 0), "merge")
    assert [one.category for one in trial.findings] == ([] if category is None else [category])


@pytest.mark.parametrize("after_first", [False, True])
def test_a_process_is_killed_in_its_run(tmp_path: Path, after_first: bool) -> None:
    log = tmp_path / "killed.txt"

    def run() -> int:
        Killer([Moment(after_first, 0.02)], None, log, "0").install()
        time.sleep(0.2)
        progress = StageProgress(None, "", 2)
        progress.advance(0)
        if after_first:
            time.sleep(0.2)
            (tmp_path / "first").touch()
            progress.advance(1)
        time.sleep(20)
        return 0

    ended = call(tmp_path, run)
    assert ended.code == -signal.SIGKILL and (tmp_path / "first").exists() == after_first
    assert len(log.read_text().split()) == 1


def test_the_workers_of_a_process() -> None:
    program = "import sys, time; print('ready', flush=True); time.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-c", program, name], stdout=subprocess.PIPE, text=True)
        for name in ("spawn_main", "resource_tracker")
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        found = local_workers(os.getpid())
        assert children[0].pid in found and children[1].pid not in found
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.slow
def test_a_few_trials_find_nothing() -> None:
    """Shards, workers and the driver, killed; `python -m benchmarks.attack.campaign` kills hundreds."""
    command = [sys.executable, "-m", "benchmarks.attack.campaign", "--seed", "0", "--trial", "0", "1", "5"]
    command += ["--engines", "shards", "workers", "driver", "--tasks", "embed", "score"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith(" killed in 3 trials, 0 findings\n")
