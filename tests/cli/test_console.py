"""The terminal: results for readers and for machines, messages, warnings, and progress."""

from __future__ import annotations

import io
import itertools
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from esm_turbo.calibration import OtherWeightsWarning
from esm_turbo.cli import console
from esm_turbo.cli.console import one_line, progress_bar, quiet, say, show, width, working
from esm_turbo.files.text_tables import text_table
from esm_turbo.model.heads import UntrainedHeadWarning
from esm_turbo.proteins.limits import LongProteinWarning

RESULT = {"a": [1, None], "b": "µ"}


def test_a_message_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("first\n  second")
    assert capsys.readouterr() == ("", "esm-turbo: first second\n")
    assert one_line(ValueError("a\tb\n")) == "a b"


def test_control_characters_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say("record 'a\x1b[2J\x07'\n")
    assert capsys.readouterr().err == "esm-turbo: record 'a\\x1b[2J\\x07'\n"
    fasta = ">a\x1b[2J\nMKT"
    show(fasta, to_json=None, result={})
    assert capsys.readouterr().out == fasta + "\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(fasta, to_json=None, result={})
    assert capsys.readouterr().out == ">a\\x1b[2J\nMKT\n"


def test_results_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "result.json"
    show("text", text_table("title", ["x"], [["1"]]), to_json=str(out), result=RESULT)
    printed = capsys.readouterr().out
    assert printed.startswith("text\n") and "title" in printed
    assert json.loads(out.read_text(encoding="utf-8")) == RESULT


def test_json_on_standard_output_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show("text", to_json="-", result=RESULT)
    assert json.loads(capsys.readouterr().out) == RESULT


def test_width_of_a_pipe_and_of_a_given_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width() == 120
    monkeypatch.setenv("COLUMNS", "77")
    assert width() == 77


def test_only_warnings_of_this_package_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet(debug=False):
        warnings.warn("of a library", FutureWarning, stacklevel=1)
        warnings.warn("of a library", UserWarning, stacklevel=1)
        for _ in range(2):
            warnings.warn("long\nproteins", LongProteinWarning, stacklevel=1)
            warnings.warn("other weights", OtherWeightsWarning, stacklevel=1)
            warnings.warn("no head", UntrainedHeadWarning, stacklevel=1)
        logging.getLogger("esm_turbo.store").warning("slow disk")
        logging.getLogger("esm_turbo.store").info("calibrated")
    assert capsys.readouterr().err.splitlines() == [
        "esm-turbo: warning: long proteins",
        "esm-turbo: warning: other weights",
        "esm-turbo: warning: no head",
        "esm-turbo: warning: slow disk",
        "esm-turbo: calibrated",
    ]
    assert not logging.getLogger("esm_turbo").handlers


def test_debugging_shows_all_warnings() -> None:
    with pytest.warns(FutureWarning, match="of a library"), quiet(debug=True):
        warnings.warn("of a library", FutureWarning, stacklevel=1)


def test_short_runs_are_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("residues") as progress, working("loading"):
        progress("embed", 1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`lines((seconds, stage, done, total), ...)`: what calls at these times print where there is no terminal."""

    def printed(*calls: tuple[float, str, int, int], stages: dict[str, int | None] | None = None) -> list[str]:
        now = 100.0
        monkeypatch.setattr(console.time, "monotonic", lambda: now)
        with progress_bar("residues", stages) as progress:
            for seconds, *call in calls:
                now = 100.0 + seconds
                progress(*call)
        out, err = capsys.readouterr()
        assert out == "" and all(line.startswith("esm-turbo: ") for line in err.splitlines())
        return [line.removeprefix("esm-turbo: ") for line in err.splitlines()]

    return printed


def test_long_runs_print_a_line_now_and_then(lines: Callable[..., list[str]]) -> None:
    checks = [(seconds, "check", seconds, 20) for seconds in range(1, 21)]
    scores = [(seconds, "score", 2000 * (seconds - 20), 1_000_000) for seconds in range(21, 101)]
    assert lines(*checks, *scores) == [
        "check: 10 of 20 residues, 1.0 per second, 10 s left",
        "score: 40,000 of 1,000,000 residues, 2,000 per second, 8 min left",
        "score: 100,000 of 1,000,000 residues, 2,000 per second, 8 min left",
        "score: 160,000 of 1,000,000 residues, 2,000 per second, 7 min left",
    ]


def test_time_between_stages_counts_for_neither(lines: Callable[..., list[str]]) -> None:
    found = lines((0, "calibrate", 5, 5), (100, "measure", 0, 60), (140, "measure", 20, 60))
    assert found[-1] == "measure: 20 of 60 residues, 0.5 per second, 80 s left"


def test_the_time_left_is_that_of_later_stages_too_where_it_is_known(lines: Callable[..., list[str]]) -> None:
    stages = {"score": None, "background": 500, "rescore": None}
    calls = [(0, "score", 0, 1000), (50, "score", 500, 1000), (100, "score", 1000, 1000)]
    calls += [(100, "background", 0, 500), (130, "background", 300, 500), (150, "background", 500, 500)]
    assert lines(*calls, (150, "rescore", 0, 9), (180, "rescore", 3, 9), stages=stages) == [
        "score: 500 of 1,000 residues, 10 per second, 2 min left with background, then rescore",
        "background: 0 of 500 residues",
        "background: 300 of 500 residues, 10 per second, 20 s left, then rescore",
        "rescore: 3 of 9 residues, 0.1 per second, 60 s left",
    ]


def test_a_long_run_without_results_yet_has_no_rate(lines: Callable[..., list[str]]) -> None:
    assert lines((60, "generate", 0, 7), (60, "generate", 7, 7)) == ["generate: 0 of 7 residues"]


def test_every_stage_has_a_bar_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = io.StringIO(), itertools.count()
    terminal = Console(file=shown, force_terminal=True, width=100, get_time=lambda: float(next(clock)))
    monkeypatch.setattr(console, "Console", lambda **_: terminal)
    with progress_bar("residues", {"calibrate": None, "embed": None, "report": None}) as progress:
        progress("calibrate", 0, 10)
        progress("calibrate", 4, 10)
        progress("calibrate", 10, 10)
        progress("embed", 5, 20)
        progress("embed", 10, 20)
    text = shown.getvalue()
    assert "calibrate" in text and "10/10" in text
    assert "embed" in text and "10/20" in text.replace(" ", "")
    assert "residues/s" in text and " s left, then report" in text


def test_a_replaced_file_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.csv"
    console.save_text(path, "first")
    assert capsys.readouterr().err == ""
    console.save_text(path, "second")
    assert capsys.readouterr().err == f"esm-turbo: replaced {path}\n"
    assert path.read_text() == "second"
