"""Building blocks of benchmarks: checks, targets, cases, interleaved timing, and peak memory."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Comparison of the measured computation with an independent one.

    Attributes:
        what: what was compared, and in which norm.
        error: the difference.
        tolerance: the largest allowed difference.
    """

    what: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        # Not `not error > tolerance`: NaN must fail.
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Target:
    """A bound on one figure.

    Attributes:
        figure: keys of the figure, outermost first.
        at_most: upper bound, or None.
        at_least: lower bound, or None.
    """

    figure: tuple[str, ...]
    at_most: float | None = None
    at_least: float | None = None

    def judge(self, figures: Figures) -> Figures:
        """The bound and the figure found; not met if the figure is missing because an arm failed."""
        found: Any = figures
        for key in self.figure:
            found = found.get(key) if isinstance(found, Mapping) else None
        met = (
            found is not None
            and (self.at_most is None or found <= self.at_most)
            and (self.at_least is None or found >= self.at_least)
        )
        bound = {"at_most": self.at_most, "at_least": self.at_least}
        return {
            "figure": " ".join(self.figure),
            **{name: value for name, value in bound.items() if value is not None},
            "found": found,
            "met": met,
        }


@dataclass(frozen=True)
class Case:
    """One row, or a few: measured only if its check passes.

    Attributes:
        name: of the case within its benchmark.
        model: the measured model.
        shape: sizes and dtypes.
        check: runs the measured computation once and compares its result.
        measure: the figures for a number of repeats; a list if there are several rows.
        targets: bounds on the figures.
    """

    name: str
    model: str
    shape: Mapping[str, Any]
    check: Callable[[], Check]
    measure: Callable[[int], Figures | list[Figures]]
    targets: Sequence[Target] = field(default=())


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference of two tensors of any dtypes."""
    return float((ours.double() - theirs.double()).abs().max())


def worst(errors: Iterable[float]) -> float:
    """The largest error; NaN if any is NaN, which `max` may ignore."""
    errors = list(errors)
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def interleave(arms: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time calls in turn, so that a machine whose speed drifts slows all of them alike.

    Args:
        arms: calls by name; the clock stops when the CUDA device, if there is one, has finished.
        repeats: number of rounds after a warm-up round; every other round runs the arms in reverse order.

    Returns:
        Seconds of each repeat.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(-1, repeats):
        for name in arms if repeat % 2 else reversed(arms):
            begin = time.perf_counter()
            arms[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat >= 0:
                times[name].append(time.perf_counter() - begin)
    return times


def timed(arms: Mapping[str, Callable[[], object]], repeats: int) -> Figures:
    """Spread of the seconds of calls that take turns, see `interleave` and `spread`."""
    return spread(interleave(arms, repeats))


def spread(times: Mapping[str, Sequence[float]]) -> Figures:
    """p20, p50 and p80 of the seconds of each arm."""
    figures = {}
    for name, seconds in times.items():
        fifths = statistics.quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 4
        figures[name] = {"p20": fifths[0], "p50": statistics.median(seconds), "p80": fifths[3]}
    return figures


def ratios(seconds: Figures, *pairs: tuple[str, str]) -> dict[str, float]:
    """Ratios of the medians of pairs of arms by "one / other", of those that were measured."""
    return {
        f"{one} / {other}": seconds[one]["p50"] / seconds[other]["p50"]
        for one, other in pairs
        if one in seconds and other in seconds
    }


def in_process(module: str, *arguments: object) -> Figures:
    """Run a module in a fresh process with as many threads as this one; its last line of output is JSON."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures: Figures = json.loads(output.splitlines()[-1])
    return figures


def peak_resident() -> int:
    """Peak bytes of physical memory of this process.

    Raises:
        OSError: the system does not report it (it is not Linux).
    """
    # Not ru_maxrss, which a process inherits from its parent.
    return status_bytes("VmHWM")


def status_bytes(name: str, process: int | str = "self") -> int:
    """Bytes of memory of a process, of a field of its status in /proc.

    Raises:
        OSError: the system has none.
    """
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{process}/status has no {name}")
