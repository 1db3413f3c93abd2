"""Timing on a CUDA device: calls captured in graphs, arms in turn, the device's cache flushed before each call.

A captured call has no launch overhead from Python. Its time is that of a graph of several flushes and calls minus that
of the flushes alone, which cancels the start of the graph and the events of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from benchmarks.harness.measure import Figures, spread

Call = Callable[[], object]

DEVICE = "cuda"
# Several times the L2 cache of the largest devices.
_FLUSHED_BYTES = 192 * 2**20
_WARM_UPS = 3


def available() -> bool:
    """True if there is a device to measure on."""
    return torch.cuda.is_available()


class Flush:
    """Flushes the device's cache by reading a large array, which leaves no dirty lines."""

    def __init__(self) -> None:
        self._array = torch.zeros(_FLUSHED_BYTES // 4, device=DEVICE)
        self._sum = torch.zeros((), device=DEVICE)

    def __call__(self) -> None:
        torch.sum(self._array, dim=0, out=self._sum)


def capture(call: Call, calls: int = 1, before: Call | None = None) -> torch.cuda.CUDAGraph:
    """Capture a call in a graph.

    Args:
        call: captured after a few warm-up runs.
        calls: how many times to capture it in sequence.
        before: captured before each call.
    """
    here = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                call()
        here.wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                if before is not None:
                    before()
                call()
    except Exception:
        # A failed capture leaves its own stream current.
        torch.cuda.set_stream(here)
        torch.cuda.synchronize()
        raise
    return graph


def captured_seconds(arms: Mapping[str, Call], repeats: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time calls captured in graphs, arms in turn.

    Args:
        arms: calls by name.
        repeats: number of rounds after a warm-up round; every other round runs the arms in reverse order.

    Returns:
        Seconds of each repeat, and the reasons why arms could not be captured or run.
    """
    flush = Flush()
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    failed = {}
    for name, call in arms.items():
        try:
            calls = _calls(call)
            graphs[name] = capture(call, calls, flush), calls
        except Exception as error:
            failed[name] = reason(error)
            torch.cuda.empty_cache()
    empty = {calls: capture(flush, calls) for _, calls in graphs.values()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat in range(-1, repeats):
        flushed = {calls: _replay_seconds(graph, flush) for calls, graph in empty.items()}
        for name in graphs if repeat % 2 else reversed(graphs):
            graph, calls = graphs[name]
            seconds = (_replay_seconds(graph, flush) - flushed.get(calls, 0.0)) / calls
            if repeat >= 0:
                times[name].append(seconds)
    return times, failed


def figures(times: Mapping[str, list[float]], failed: Mapping[str, str]) -> Figures:
    """Spread of the times, and the failures if there are any."""
    found: Figures = {"seconds": spread(times)}
    return found | {"failed": dict(failed)} if failed else found


def reason(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _calls(call: Call) -> int:
    """Number of times to put a call into a graph."""
    for _ in range(_WARM_UPS):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    milliseconds = begin.elapsed_time(end)
    return 1 if milliseconds > 5 else 4 if milliseconds > 1 else 12


def _replay_seconds(graph: torch.cuda.CUDAGraph, flush: Flush) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # While this runs, the following is queued.
    flush()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
