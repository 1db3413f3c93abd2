"""Threads of commands on a CPU: no more than there are cores to run them.

Threads that share a core wait for each other in every operation, so that two of them can be slower than one. PyTorch
counts the machine's cores; it knows neither the limits of a container nor how busy the machine is. The quota is read
here since loky's `cpu_count` looks at the outermost control group only, and not at the process's own.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from esm_turbo.files.control_groups import CGROUPS, CGROUPS_ROOT, control_groups


def set_threads(threads: int | None) -> None:
    """Set the number of PyTorch's threads; None is `default_threads`."""
    import torch

    torch.set_num_threads(default_threads() if threads is None else threads)


def default_threads() -> int:
    """PyTorch's own number (which `OMP_NUM_THREADS` sets), but at most the free cores, and at least 1.

    Free are the cores that this process may use, less those that are busy: the load average of the last minute.
    """
    import torch

    own = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return own
    return max(1, min(own, usable_cores() - _busy_cores()))


def usable_cores() -> int:
    """Number of cores that this process may use: of the machine, its affinity, and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def _busy_cores() -> int:
    return round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0


def _quota(groups: Path = CGROUPS, root: Path = CGROUPS_ROOT) -> float | None:
    """Linux: cores' worth of time that this process's control groups may use; None without a limit."""
    limits = []
    for version, folder in control_groups("cpu", groups, root):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = (
                    (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip() for name in ("quota", "period")
                )
            if quota not in ("max", "-1"):
                limits.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(limits, default=None)
