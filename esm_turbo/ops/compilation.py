"""Compiles kernels side by side, in processes of their own, before they are launched.

One after the other they would take minutes. Triton's compiler holds Python's lock, so that threads gain little. Triton
keeps what is compiled in a folder (`TRITON_CACHE_DIR`), where the process that launches the kernels finds it, and every
later one on the machine.

The processes are new interpreters that run this module: a fork would copy a process with threads and a device, and
multiprocessing would run the user's script again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from esm_turbo.ops.variants import KernelError, Variant

# A process takes about half a gigabyte.
MOST_PROCESSES = 24
# The kernel that takes longest to compile begins first.
_SLOWEST_FIRST = ("attend_context", "encode_context", "merge")


def compile_together(variants: Iterable[Variant], processes: int | None = None) -> int:
    """Compiles those variants that Triton's cache does not hold, and says so in one line on standard error.

    Args:
        variants: to compile.
        processes: that compile at the same time; None for as many as there are cores.

    Returns:
        Number of kernels that were compiled.

    Raises:
        KernelError: a kernel does not compile.
        KernelCacheError: the cache cannot be read or written.
    """
    missing = [variant for variant in dict.fromkeys(variants) if not variant.is_cached()]
    if not missing:
        return 0
    missing.sort(key=lambda variant: (*_SLOWEST_FIRST, variant.name).index(variant.name))
    processes = min(len(missing), processes or _cores(), MOST_PROCESSES)
    print(
        f"esm-turbo: compiling {len(missing)} GPU kernels in {processes} processes, once on this machine",
        file=sys.stderr,
        flush=True,
    )
    workers: list[subprocess.Popen[bytes]] = []
    try:
        # Where no process can be started or one dies, as for lack of memory, what it has left is compiled below.
        with contextlib.suppress(OSError):
            for share in _shares(missing, processes):
                workers.append(_start(share))
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for variant in missing:
        if not variant.is_cached():
            variant.compile()
    return len(missing)


def _shares(variants: Sequence[Variant], processes: int) -> list[list[Variant]]:
    """The variants in turn, forth and back, so that whoever has the slowest gets the least besides."""
    shares: list[list[Variant]] = [[] for _ in range(processes)]
    for number, variant in enumerate(variants):
        turn, place = divmod(number, processes)
        shares[-1 - place if turn % 2 else place].append(variant)
    return shares


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(variants: Sequence[Variant]) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen(
        # -P, and the path as it is here: modules of the current folder count only where they do already.
        [sys.executable, "-P", "-m", "esm_turbo.ops.compilation"],
        stdin=subprocess.PIPE,
        # What libraries print is no output of this program.
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin:
        worker.stdin.write(pickle.dumps(variants))
    return worker


def compile_all(variants: Iterable[Variant]) -> None:
    """Compiles variants in this process, one after the other; those that do not compile are left out."""
    for variant in variants:
        with contextlib.suppress(KernelError):
            _compile_launcher(variant.compile())


def _compile_launcher(compiled: Any) -> None:
    """Compiles the C function that launches a kernel, which older versions of Triton make for each signature."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


if __name__ == "__main__":
    compile_all(pickle.load(sys.stdin.buffer))
