"""What a worker does beside computing: errors and warnings reach the caller, and it ends with whoever started it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from esm_turbo.files.writing import WritingError
from esm_turbo.parallel import worker
from esm_turbo.parallel.worker import filled_by_others
from esm_turbo.parallel.workers import NoWorkersError, Workers
from tests.helpers.numbers_to_square import Crowd, HalfAnAnswer, Load, Raises, Squares, Threads, begin_with_torch


class Unportable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class UnportableValue(ValueError):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (partial(Unportable, 1, 2), RuntimeError, "Unportable: 1 and 2"),
        (partial(UnportableValue, 1, 2), ValueError, "1 and 2"),
        (partial(WritingError, "a.pt", "full", 28), OSError, "a.pt: cannot be written (full)"),
        (partial(KeyError, "a"), KeyError, "'a'"),
    ],
)
def test_errors_keep_their_kind_message_and_traceback(
    make: Callable[[], Exception], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    """A command reports those of a full disk, for example, in a line of their own; results before them are kept."""
    found: dict[int, tuple[int, str]] = {}
    pieces = range(40)
    with Workers(Load(), ["cpu"]) as workers, pytest.raises(kind) as raised:
        for number, result in workers.run(Raises(tmp_path, (37,), error=make), pieces, stage="", units=[1] * 40):
            found[number] = result
    assert type(raised.value) is kind and str(raised.value) == message
    [note] = raised.value.__notes__
    assert note.startswith("in the worker:\nTraceback") and "raise self.error()" in note
    assert found == {number: (number**2, "cpu") for number in range(37)}


def test_a_device_that_others_fill_is_left_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record fails there that would fit on an empty device: it is run on another."""
    with (
        caplog.at_level(logging.WARNING, "esm_turbo"),
        Workers(Crowd(("cpu:0",)), ["cpu:0", "cpu:1"]) as workers,
    ):
        while not caplog.records:
            found = dict(workers.run(Raises(tmp_path), range(9), stage="", units=[1] * 9))
            assert found == {number: (number**2, "cpu:1") for number in range(9)}
    assert caplog.messages == ["cpu:0 cannot be used: others fill it; the others go on without it"]


def test_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled_by_others("cpu") is None
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * 2**30)
    for free, expected in ((80, None), (20, "other processes hold 70.0 GiB of its 100.0 GiB of memory")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 100 * 2**30))
        assert filled_by_others("cuda:1") == expected


@pytest.mark.parametrize("begin", [worker.begin, begin_with_torch])
def test_threads_are_those_asked_for_though_torch_was_imported_before(
    begin: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a process whose starting program imports it at its head."""
    monkeypatch.setattr(worker, "begin", begin)
    with (
        caplog.at_level(logging.WARNING, "esm_turbo"),
        Workers(Threads(), ["cpu"], threads=2) as workers,
        pytest.raises(NoWorkersError),
    ):
        list(workers.run(Squares(Path()), [1], stage="", units=[1]))
    assert caplog.messages == ["cpu cannot be used: 2 threads; the others go on without it"]


def test_a_process_killed_while_it_sends_a_result_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for the rest of it."""
    with caplog.at_level(logging.WARNING, "esm_turbo"), Workers(Load(), ["cpu"]) as workers:
        found = dict(workers.run(HalfAnAnswer(tmp_path), range(3), stage="", units=[1] * 3))
    assert found == {number: (number**2, "cpu") for number in range(3)}
    assert caplog.messages == ["a worker on cpu died (signal SIGKILL); it is replaced"]


_DRIVER = """
import os, sys, time
from esm_turbo.parallel.workers import Workers
from pathlib import Path
from tests.helpers.numbers_to_square import Load, Pids

if __name__ == "__main__":
    with Workers(Load(), ["cpu", "cpu"]) as workers:
        print(*{pid for _, pid in workers.run(Pids(), [0.2] * 9, stage="", units=[1] * 9)}, flush=True)
        if sys.argv[1] == "busy":
            print(next(workers.run(Pids(), [0, 60, 60], stage="", units=[1, 0, 0])), flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_processes_end_with_a_driver_that_is_killed(state: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    root = str(Path(__file__).parents[2])
    driver = subprocess.Popen(
        [sys.executable, script, state], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    if state == "busy":
        assert driver.stdout.readline()
    driver.send_signal(signal.SIGKILL)
    driver.wait(30)
    end = time.monotonic() + 30
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
