"""The attack as a program: what it says of findings, and its short form, which finds nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attack import __main__ as program
from benchmarks.attack.commands import References
from benchmarks.attack.trial import Finding
from benchmarks.harness import records

ROOT = Path(__file__).resolve().parents[3]


def fake(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Finds something in every other trial, decided by chance alone."""
    assert not folder.exists()
    folder.mkdir()
    return [Finding("different", f"a\nnumber {rng.random()}")] if rng.random() < 0.5 else []


def broken(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    raise KeyError("M")


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "KINDS", {"fake": fake, "broken": broken})


def run(tmp_path: Path, *kinds: str, **options: int) -> list[dict[str, object]]:
    return program.attack(kinds, 0, 60.0, References(tmp_path / "references"), **options)


def test_a_line_repeats_its_trial(kinds: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, "fake", most=20)
    lines = capsys.readouterr().out.splitlines()
    found = [entry for entry in done if entry["findings"]]
    assert [entry["number"] for entry in done] == list(range(20))
    assert 0 < len(found) == len(lines) < 20
    for entry, line in zip(found, lines, strict=True):
        assert line.startswith("fake: different: a number 0.")
        command = f"python -m benchmarks.attack --only fake --seed 0 --trial {entry['number']}"
        assert line.endswith(f" | {command}")
        [again] = run(tmp_path, "fake", first=entry["number"], most=1)
        assert again["findings"] == entry["findings"]


def test_workers_take_different_trials(kinds: None, tmp_path: Path) -> None:
    numbers = [[entry["number"] for entry in run(tmp_path, "fake", first=i, step=3, most=4)] for i in range(3)]
    assert sorted(number for some in numbers for number in some) == list(range(12))


def test_a_trial_that_fails_is_a_finding(kinds: None, tmp_path: Path) -> None:
    [entry] = run(tmp_path, "broken", most=1)
    [[category, what]] = entry["findings"]
    assert category == "trial failed"
    assert what.startswith("KeyError: 'M' (test___main__.py, line ")


def test_a_row_is_recorded(kinds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "turbo", lambda: None)
    out = tmp_path / "attack.jsonl"
    assert program.main(["--seconds", "0.2", "--workers", "1", "--seed", "3", "--out", str(out)]) == 1
    [row] = records.read(out, "attack")
    figures = row["figures"]
    assert figures["command"].startswith("python -m benchmarks.attack --seconds 0.2 --workers 1 --seed 3")
    assert str(tmp_path) not in figures["command"]
    assert figures["trials"].keys() == {"fake", "broken"}
    assert figures["findings"]["broken"] == {"trial failed": figures["trials"]["broken"]}
    assert figures["findings_total"] == sum(sum(counts.values()) for counts in figures["findings"].values())
    assert len(figures["quoted"]["broken"]) == min(20, figures["trials"]["broken"])
    assert program.main(["--only", "broken", "--trial", "0", "--out", str(out)]) == 1
    assert len(records.read(out)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_the_short_form_finds_nothing(part: int) -> None:
    """One trial of each kind, half of the kinds at a time; `make attack` makes thousands."""
    kinds = list(program.KINDS)[part::2]
    command = [sys.executable, "-m", "benchmarks.attack", "--seed", "0", "--trial", "1", "--only", *kinds]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"{len(kinds)} trials, 0 findings\n"), ended.stdout + ended.stderr
