"""Where a figure was measured: the commit of the source, the processor, the packages."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

# What decides a figure; a result file that grows does not make the source another one.
_SOURCES = ("esm_turbo", "benchmarks", "calibration_data", "pyproject.toml", ":!benchmarks/results")
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Revision:
    """The commit of a checkout.

    Attributes:
        commit: full hash.
        dirty: whether sources differ from that commit, new files included.
    """

    commit: str
    dirty: bool


def source_revision(checkout: str | os.PathLike[str] = _CHECKOUT) -> Revision | None:
    """The commit that this package runs from; None where it is installed or git is missing."""
    if not (Path(checkout) / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "HEAD")
    changes = _git(checkout, "status", "--porcelain", "--", *_SOURCES)
    return None if commit is None or changes is None else Revision(commit, bool(changes))


def processor_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device | str) -> str:
    """The accelerator's name, or the processor's for the CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else f"{device.type} of {processor_name()}"


def _git(checkout: str | os.PathLike[str], *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(checkout), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
