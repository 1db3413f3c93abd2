"""Peak of what PyTorch allocates on the CPU."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def peak_allocation(call: Callable[[], object]) -> int:
    """Peak bytes of PyTorch's CPU allocator during a call, beyond those held before.

    The profiler reports every allocation and release, including those inside operators, but not the memory that the
    linear algebra library takes from the system directly.
    """
    call()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    del result
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        held += size
        peak = max(peak, held)
    return peak
