"""Journals: what is kept of an unfinished run, and what damage, other writers and full disks do to it."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from esm_turbo.files import journal as journals
from esm_turbo.files.journal import Journal, journal_beside, key_of
from esm_turbo.files.writing import FolderBusyError


def test_values_of_a_stopped_run_are_found(tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    with pytest.raises(KeyboardInterrupt), journal_beside(out) as journal:
        assert journal is not None
        journal.add("a", {"x": [0.1, -math.inf, 1e-320]})
        journal.add("b", [1])
        raise KeyboardInterrupt
    with journal_beside(out) as journal:
        assert journal is not None
        assert journal.get("a") == {"x": [0.1, -math.inf, 1e-320]}
        assert journal.get("c") is None
        assert (journal.found, journal.added) == (1, 0)
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_journal_without_values_leaves_nothing(tmp_path: Path) -> None:
    with journal_beside(tmp_path / "scores.csv"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_line_at_whose_writing_a_run_was_killed_is_not_there(tmp_path: Path) -> None:
    whole = Journal(tmp_path)
    whole.add("a", 1)
    whole.add("b", 2)
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        journal = Journal(tmp_path)
        expected = None if size < data.index(b"\n") else 1
        assert (journal.get("a"), journal.get("b")) == (expected, None if size < len(data) - 1 else 2)
        journal.add("c", 3)
        again = Journal(tmp_path)
        assert (again.get("a"), again.get("c")) == (expected, 3)


def test_altered_values_are_not_there(tmp_path: Path) -> None:
    Journal(tmp_path).add("a", 12345)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b"12345", b"12346"))
    assert Journal(tmp_path).get("a") is None


@pytest.mark.parametrize("line", [b"[]", b"1", b"\xff\xfe", b'{"key": "a"}', b'{"sha256": 1, "value": 2}'])
def test_other_lines_are_passed_over(tmp_path: Path, line: bytes) -> None:
    Journal(tmp_path).add("a", 1)
    [path] = tmp_path.iterdir()
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert Journal(tmp_path).get("a") == 1


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    busy = f"^{out}: another process is writing it; let it finish, or give another file$"
    with journal_beside(out), pytest.raises(FolderBusyError, match=busy), journal_beside(out):
        pass
    with journal_beside(out), journal_beside(tmp_path / "other.csv"):
        pass


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / journals._FILE).mkdir()
    journal = Journal(tmp_path)
    with caplog.at_level(logging.WARNING, logger="esm_turbo"):
        journal.add("a", 1)
        journal.add("b", 2)
    assert caplog.text.count("this run cannot be resumed") == 1
    assert journal.get("a") is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".scores.csv.parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="symbolic link"), journal_beside(tmp_path / "scores.csv"):
        pass


def test_no_journal_without_a_file() -> None:
    for out in (None, Path("/dev/null")):
        with journal_beside(out) as journal:
            assert journal is None


def test_a_key_depends_on_every_value() -> None:
    keys = [key_of("score", {"a": 1, "b": 2}, "MK"), key_of("score", {"b": 2, "a": 1}, "MK")]
    others = [key_of("score", {}, "MK"), key_of("rescore", {"a": 1, "b": 2}, "MK")]
    assert keys[0] == keys[1] and len({keys[0], *others}) == 3


def test_values_of_another_run_are_told_by_their_stage(tmp_path: Path) -> None:
    keys = [key_of("score", 1), key_of("background", 1)]
    Journal(tmp_path).add(keys[1], {})
    journal = Journal(tmp_path)
    # Of a run whose first stage could keep nothing.
    assert not journal.is_of_another_run("score")
    assert journal.is_of_another_run("background")
    # What this run adds is its own.
    journal.add(keys[0], {})
    assert not journal.is_of_another_run("score")
    assert journal.get(keys[1]) == {} and not journal.is_of_another_run("background")
