"""Provenance of figures: the commit, and names of processors and devices."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.harness.environment import device_name, processor_name, source_revision


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, laid out like this one."""
    for name in ("esm_turbo", "benchmarks/results", "calibration_data"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("committed")
    (tmp_path / "pyproject.toml").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "dirty"),
    [
        ("esm_turbo/file", True),
        ("benchmarks/new.py", True),
        ("pyproject.toml", True),
        ("benchmarks/results/new.jsonl", False),
        ("README.md", False),
    ],
)
def test_changed_and_new_sources_are_dirty_but_not_results_and_prose(checkout: Path, name: str, dirty: bool) -> None:
    (checkout / name).write_text("changed")
    assert source_revision(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": dirty}


def test_an_installed_package_and_a_missing_git_have_no_revision(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed").mkdir()
    assert source_revision(tmp_path / "installed") is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert source_revision(checkout) is None


def test_the_processor_is_that_of_the_system_or_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nmodel name\t: Xeon: fast \nmodel name\t: other\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert processor_name() == device_name("cpu") == "Xeon: fast"
    assert device_name(torch.device("mps")) == "mps of Xeon: fast"

    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert processor_name() == "arm64"
