"""The default number of threads: what PyTorch would take, the container allows, and the machine has free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from esm_turbo.cli import threads


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of eight cores, idle and without limits; PyTorch would use all of them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 9.0, 9.0), raising=False)
    monkeypatch.setattr(threads, "_quota", lambda: None)
    return monkeypatch


@pytest.mark.parametrize(
    ("load", "quota", "expected"),
    [
        (0.4, None, 8), (2.6, None, 5), (7.0, None, 1), (30.0, None, 1),
        (0.0, 3.5, 3), (0.0, 0.5, 1), (0.0, 64.0, 8),
    ],
)  # fmt: skip
def test_neither_busy_cores_nor_the_limits_of_a_container_are_exceeded(
    eight_cores: pytest.MonkeyPatch, load: float, quota: float | None, expected: int
) -> None:
    eight_cores.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    eight_cores.setattr(threads, "_quota", lambda: quota)
    assert threads.default_threads() == expected
    eight_cores.setenv("OMP_NUM_THREADS", "8")
    assert threads.default_threads() == 8


@pytest.mark.parametrize(
    ("line", "folder", "limited", "unlimited"),
    [
        ("0::/user/job", "user/job", {"cpu.max": "150000 100000\n"}, {"cpu.max": "max 100000\n"}),
        (
            "4:cpu,cpuacct:/user/job",
            "cpu/user/job",
            {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"},
            {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_quota_of_control_groups(
    tmp_path: Path, line: str, folder: str, limited: dict[str, str], unlimited: dict[str, str]
) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text(f"{line}\n")
    inner = root / folder
    inner.mkdir(parents=True)
    assert threads._quota(groups, root) is None
    for content, expected in ((unlimited, None), (limited, 1.5)):
        for name, text in content.items():
            (inner / name).write_text(text)
        assert threads._quota(groups, root) == expected
    # Groups above limit this one too.
    for name, text in limited.items():
        (inner.parent / name).write_text(text.replace("150000", "50000"))
    assert threads._quota(groups, root) == 0.5
    assert threads._quota(tmp_path / "absent", root) is None
