"""Provenance of figures: the commit of the source and the processor."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

# Files that figures depend on; new results do not make a checkout dirty.
_SOURCES = ("esm_turbo", "benchmarks", "calibration_data", "pyproject.toml", ":!benchmarks/results")
_CHECKOUT = Path(__file__).resolve().parents[2]


def source_revision(checkout: str | os.PathLike[str] = _CHECKOUT) -> dict[str, Any] | None:
    """The commit that this package runs from, and whether sources differ from it, untracked files included.

    None for an installed package or without git.
    """
    if not (Path(checkout) / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "HEAD")
    changes = _git(checkout, "status", "--porcelain", "--", *_SOURCES)
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def processor_name() -> str:
    """Name of the processor, as reported by the system."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device | str) -> str:
    """Name of the accelerator, or of the processor for the CPU."""
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
