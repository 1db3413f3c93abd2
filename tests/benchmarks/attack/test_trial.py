"""What counts as a fault of a command, and forks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.attack import trial
from benchmarks.attack.trial import OTHER_NUMBERS, Outcome, about, faults, library, library_faults


def outcome(code: int = 0, err: str = "", *, out: str = "", hung: bool = False, size: int = 0) -> Outcome:
    return Outcome(code, out, err, hung, size)


@pytest.mark.parametrize(
    ("ended", "categories"),
    [
        (outcome(0), []),
        (outcome(0, "esm-turbo: warning: 1 protein truncated to 5 residues\n"), []),
        (outcome(2, "esm-turbo: error: a.fasta: line 3: no sequence\n"), []),
        (outcome(2, ""), ["message"]),
        (outcome(2, "esm-turbo: error: a.fasta: \n"), ["message"]),
        (outcome(1, "esm-turbo: error: KeyError: 'M'; --debug shows where\n"), ["message"]),
        (outcome(1, "esm-turbo: error: a\nmore of it\n"), ["message"]),
        (outcome(-signal.SIGSEGV), ["exit"]),
        (outcome(3, "esm-turbo: error: a\n"), ["exit"]),
        (outcome(1, "Traceback (most recent call last):\nKeyError: 'M'\n"), ["traceback", "message"]),
        (outcome(0, hung=True), ["hang"]),
        (outcome(0, size=2**31), ["memory"]),
    ],
)
def test_faults(ended: Outcome, categories: list[str]) -> None:
    assert [fault.category for fault in faults(ended)] == categories


def test_a_call_ends_as_a_command_does(tmp_path: Path) -> None:
    def refuse() -> int:
        print("a result")
        raise ValueError("a.fasta: not\nFASTA")

    ended = library(tmp_path, refuse)
    assert (ended.code, ended.out, ended.err) == (2, "a result\n", "esm-turbo: error: a.fasta: not FASTA\n")
    assert faults(ended) == []


def test_other_results_of_a_call_are_found_in_its_last_words(tmp_path: Path) -> None:
    def differ() -> int:
        print("tried it\nby 0.5")
        return OTHER_NUMBERS

    [found] = about("a cache", library_faults(library(tmp_path, differ)))
    assert (found.category, found.what) == ("different", "a cache: by 0.5")
    [found] = library_faults(outcome(OTHER_NUMBERS))
    assert found.category == "different" and found.what
    assert library_faults(outcome(0)) == []


def test_much_output_does_not_block(tmp_path: Path) -> None:
    def speak() -> int:
        print("a" * 10**6)
        return 0

    assert len(library(tmp_path, speak).out) == 10**6 + 1


def test_an_unexpected_error_is_a_traceback(tmp_path: Path) -> None:
    def fail() -> int:
        raise KeyError("M")

    assert [fault.category for fault in faults(library(tmp_path, fail))] == ["exit", "traceback"]


def test_a_call_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.2)

    def wait() -> int:
        signal.pause()
        return 0

    assert [fault.category for fault in faults(library(tmp_path, wait))] == ["hang"]


def test_memory_is_counted_beyond_what_the_fork_began_with(tmp_path: Path) -> None:
    def take() -> int:
        return len(b"x" * (300 * 2**20)) % 2

    assert 250 * 2**20 < library(tmp_path, take).bytes < 500 * 2**20
