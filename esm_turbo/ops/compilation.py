"""Compiles kernels side by side, in processes of their own, before they are launched.

One after the other they would take minutes. Triton's compiler holds Python's lock, so that threads gain little. Triton
keeps what is compiled in a folder (`TRITON_CACHE_DIR`), where the process that launches the kernels finds it, and every
later one on the machine.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from threading import Thread

from esm_turbo.ops.variants import Variant

# A process takes about half a gigabyte.
MOST_PROCESSES = 24
# The kernel that takes longest to compile begins first.
_SLOWEST_FIRST = ("attend_context", "encode_context", "merge")


def compile_together(variants: Iterable[Variant], processes: int | None = None) -> tuple[int, list[str]]:
    """Compiles those variants that Triton's cache does not hold, and says so in one line on standard error.

    Args:
        variants: to compile.
        processes: that compile at the same time; None for as many as there are cores.

    Returns:
        Number of kernels that were compiled, and why others were not.

    Raises:
        KernelCacheError: the cache cannot be read or written.
    """
    missing = [variant for variant in dict.fromkeys(variants) if not variant.is_cached()]
    if not missing:
        return 0, []
    missing.sort(key=lambda variant: (*_SLOWEST_FIRST, variant.name).index(variant.name))
    processes = min(len(missing), processes or _cores(), MOST_PROCESSES)
    print(
        f"esm-turbo: compiling {len(missing)} GPU kernels in {processes} processes, once on this machine",
        file=sys.stderr,
        flush=True,
    )
    queue: SimpleQueue[Variant] = SimpleQueue()
    for variant in missing:
        queue.put(variant)
    reasons: list[str] = []
    workers: list[subprocess.Popen[bytes]] = []
    try:
        while len(workers) < processes:
            workers.append(_start())
    except OSError as error:
        for worker in workers:
            worker.kill()
            worker.communicate()
        return 0, [f"no process that compiles GPU kernels could be started: {error.strerror}"]
    threads = [Thread(target=_feed, args=(worker, queue, reasons), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return len(missing) - len(reasons), reasons


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start() -> subprocess.Popen[bytes]:
    # A new interpreter: a fork would copy a process with threads and a device, and multiprocessing would run the
    # user's script again.
    return subprocess.Popen(
        # -P, and the path as it is here: modules of the current folder count only where they do already.
        [sys.executable, "-P", "-m", "esm_turbo.ops.compile_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )


def _feed(worker: subprocess.Popen[bytes], queue: SimpleQueue[Variant], reasons: list[str]) -> None:
    """Sends variants to a process until none is left, or until it dies."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    while True:
        try:
            variant = queue.get_nowait()
        except Empty:
            return
        try:
            pickle.dump(variant, worker.stdin)
            worker.stdin.flush()
            reason = pickle.load(worker.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            reasons.append(f"the process that compiled the GPU kernel {variant.name!r} died ({type(error).__name__})")
            return
        if reason is not None:
            reasons.append(reason)
