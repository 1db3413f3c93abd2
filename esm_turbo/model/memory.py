"""Too little memory: recognised on every device, and the memory that is free.

Devices, allocators and libraries report a lack of memory by errors of many types. `is_out_of_memory` knows them all,
and everything that can continue with smaller or other work asks it.

Free memory is read here since psutil knows that of the machine, but neither the limits of control groups nor `ulimit`.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

from esm_turbo.files.control_groups import CGROUPS, CGROUPS_ROOT, control_groups

# PyTorch has an exception class for CUDA's and XPU's allocators only; the CPU's, MPS, cuBLAS, oneDNN and sizes that
# overflow raise plain RuntimeErrors. The dynamic linker fails to map a library.
_MESSAGE = re.compile(
    r"out of memory|not enough memory|n[o']t allocate memory|bad_alloc|ALLOC_FAILED|could not create a memory object"
    r"|Storage size calculation overflowed|failed to map segment",
    re.IGNORECASE,
)


class NotEnoughMemoryError(MemoryError):
    """An input needs more memory than the device has free."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means too little memory, of a device or of this machine."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError | ImportError | SafetensorError) and _MESSAGE.search(str(error)) is not None


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch holds on to freed memory for reuse.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return None
    found = [_meminfo(), _control_groups(), _address_space()]
    return min((size for size in found if size is not None), default=None)


def _meminfo(path: Path = Path("/proc/meminfo")) -> int | None:
    """Linux: the kernel's estimate of available memory."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _control_groups(groups: Path = CGROUPS, root: Path = CGROUPS_ROOT) -> int | None:
    """Linux: the least that this process's control groups, of version 1 or 2, have left; None without a limit."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    left = [_left(folder, *names[version]) for version, folder in control_groups("memory", groups, root)]
    return min((size for size in left if size is not None), default=None)


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes that one control group has left; None without a limit."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / usage).read_text(encoding="ascii"))
        entries = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        # Inactive file pages are reclaimed first.
        used -= sum(int(size) for name, size in entries if name == reclaimable)
        return None if most == "max" else max(0, int(most) - used)
    except (OSError, ValueError):
        return None


def _address_space(path: Path = Path("/proc/self/statm")) -> int | None:
    """Linux: what `ulimit -v` leaves to this process; None without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(path.read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))
