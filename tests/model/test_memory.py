"""Free memory as systems report it, and errors that mean too little of it."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from esm_turbo.model import memory
from esm_turbo.model.memory import NotEnoughMemoryError, available_bytes, is_out_of_memory

# What PyTorch raises as a RuntimeError on the CPU, on MPS, in cuBLAS, for sizes beyond 64 bits, and in C++.
MESSAGES = [
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9",
    "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.",
    "MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 9.00 MB, max allowed: 9.07 GB).",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Storage size calculation overflowed with sizes=[8589934592, 8589934592]",
    "unable to mmap 64 bytes from file </x>: Cannot allocate memory (12)",
    "std::bad_alloc",
]


@pytest.mark.parametrize(
    "error",
    [
        *map(RuntimeError, MESSAGES),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        NotEnoughMemoryError("9 tokens"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
        SafetensorError("Cannot allocate memory (os error 12)"),
    ],
)
def test_too_little_memory_is_one_kind_of_error(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_what_this_machine_raises_is_too_little_memory() -> None:
    for allocate in (
        lambda: torch.empty(2**50),
        lambda: torch.empty(2**33, 2**33),
        lambda: np.empty(2**50),
        lambda: bytearray(2**60),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), OSError(errno.ENOSPC, "")],
)
def test_other_errors_are_not_too_little_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_free_memory_of_this_machine() -> None:
    free = available_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


def test_free_memory_from_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    assert memory._meminfo(path) == 64 * 1024
    path.write_text("MemTotal:       100 kB\n")
    assert memory._meminfo(path) is None
    assert memory._meminfo(tmp_path / "missing") is None


def make_group(folder: Path, version: int, limit: str) -> None:
    """A control group that has used 700 bytes, 250 of which can be reclaimed."""
    folder.mkdir(parents=True, exist_ok=True)
    most, used, prefix = ("max", "current", "") if version == 2 else ("limit_in_bytes", "usage_in_bytes", "total_")
    (folder / f"memory.{most}").write_text(f"{limit}\n")
    (folder / f"memory.{used}").write_text("700\n")
    (folder / "memory.stat").write_text(f"anon 300\n{prefix}inactive_file 250\nactive_file 150\n")


@pytest.mark.parametrize(
    ("version", "line", "folder"),
    [(2, "0::/user/job", ""), (1, "9:pids:/\n4:cpuset,memory:/user/job\n0::/", "memory")],
)
def test_free_memory_of_control_groups(tmp_path: Path, version: int, line: str, folder: str) -> None:
    """The least that the group and those above it have left, and never less than nothing."""
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text(line + "\n")
    unlimited = "max" if version == 2 else "9223372036854771712"
    top = root / folder
    inner = top / "user" / "job"
    make_group(inner, version, unlimited)
    assert memory._control_groups(groups, root) in (None, 9223372036854771712 - 450)
    make_group(inner, version, "1000")
    assert memory._control_groups(groups, root) == 1000 - 450
    make_group(top / "user", version, "800")
    assert memory._control_groups(groups, root) == 800 - 450
    make_group(inner, version, "100")
    assert memory._control_groups(groups, root) == 0
    # In a container, the group itself is mounted, under a name that lies outside.
    groups.write_text(line.replace("/user/job", "/docker/abc") + "\n")
    make_group(top, version, "600")
    assert memory._control_groups(groups, root) == 600 - 450
    assert memory._control_groups(tmp_path / "missing", root) is None


@pytest.mark.parametrize("limit", [4, 6])
def test_a_limit_of_the_address_space_counts(limit: int) -> None:
    """`ulimit -v`; PyTorch itself takes part of it."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit} * 2**30,) * 2)\n"
        "import torch; from esm_turbo.model.memory import available_bytes\n"
        "print(available_bytes(torch.device('cpu')))"
    )
    free = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < free < limit * 2**30
