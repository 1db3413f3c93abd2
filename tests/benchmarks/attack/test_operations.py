"""Operations on files: which are counted, and how each disturbance ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.attack.operations import Operations
from benchmarks.attack.trial import Outcome, call

DONE = b"abcdefgh"


def by_rename() -> int:
    """Open, write, rename."""
    with open("a.tmp", "wb") as file:
        file.write(DONE)
    os.replace("a.tmp", "a")
    return 0


def by_descriptor() -> int:
    """Open, write, sync, remove."""
    descriptor = os.open("a", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, DONE)
    os.fsync(descriptor)
    os.close(descriptor)
    os.unlink("a")
    return 0


def by_safetensors() -> int:
    """One write."""
    save_file({"x": torch.zeros(100)}, "a.safetensors")
    return 0


def by_h5py() -> int:
    """Two data sets and the end."""
    import h5py

    with h5py.File("a.h5", "w") as file:
        for name in "xy":
            file.create_dataset(name, data=[1, 2])
    return 0


def elsewhere() -> int:
    """Nothing in this folder."""
    Path("../elsewhere").write_bytes(DONE)
    Path("../elsewhere").read_bytes()
    os.unlink("../elsewhere")
    return 0


def run(folder: Path, job: Callable[[], int], *disturbance: object) -> Outcome:
    folder.mkdir(exist_ok=True)

    def disturbed() -> int:
        operations = Operations(folder, *disturbance)  # type: ignore[arg-type]
        operations.install()
        operations.report(folder.parent / "count")
        return job()

    return call(folder, disturbed)


@pytest.mark.parametrize(
    ("job", "count"), [(by_rename, 3), (by_descriptor, 4), (by_safetensors, 1), (by_h5py, 3), (elsewhere, 0)]
)
def test_operations_are_counted(tmp_path: Path, job: Callable[[], int], count: int) -> None:
    assert run(tmp_path / "folder", job).code == 0
    assert int((tmp_path / "count").read_text()) == count


@pytest.mark.parametrize(
    ("at", "how", "left"),
    [
        (0, "kill", {}),
        (1, "kill", {"a.tmp": b""}),
        (1, "half", {"a.tmp": DONE[:4]}),
        (2, "kill", {"a.tmp": DONE}),
        (3, "kill", {"a": DONE}),
    ],
)
def test_kills(tmp_path: Path, at: int, how: str, left: dict[str, bytes]) -> None:
    ended = run(tmp_path / "folder", by_rename, at, how)
    assert ended.code == (0 if at == 3 else -signal.SIGKILL)
    assert {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()} == left


def test_half_of_an_artifact(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", by_safetensors).code == 0
    assert run(tmp_path / "folder", by_safetensors, 0, "half").code == -signal.SIGKILL
    whole, half = ((tmp_path / name / "a.safetensors").read_bytes() for name in ("whole", "folder"))
    assert half == whole[: len(whole) // 2]


@pytest.mark.parametrize(("how", "reason"), [("full", "No space left"), ("read-only", "Read-only file system")])
@pytest.mark.parametrize("job", [by_rename, by_descriptor, by_safetensors])
def test_disks(tmp_path: Path, how: str, reason: str, job: Callable[[], int]) -> None:
    ended = run(tmp_path / "folder", job, 0, how)
    assert reason in ended.err
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_full_disk_lets_files_be_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").touch()

    def remove() -> int:
        os.unlink("a")
        return 0

    assert run(tmp_path / "folder", remove, 0, "full").code == 0
    assert list((tmp_path / "folder").iterdir()) == []
