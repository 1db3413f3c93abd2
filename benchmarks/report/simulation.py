"""A discrete simulation of workers that read, compute and write through what they share.

Every worker has a device and a core. It takes a piece, reads it, computes it on the device, prepares its results on the
core, writes them, and takes the next; one that looks ahead computes a piece while it writes the one before. Reads and
writes go through one disk or network, which serves one request after another at its full bandwidth.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

SHARED, DEVICE, CORE = "disk or network", "device", "core"


@dataclass(frozen=True)
class Work:
    """A piece, or a number of equal ones one after another.

    Attributes:
        read: bytes of its input.
        compute: seconds on a device.
        prepare: seconds on a core.
        write: bytes of its results.
    """

    read: float
    compute: float
    prepare: float
    write: float


@dataclass(frozen=True)
class Outcome:
    """What a simulated run took.

    Attributes:
        seconds: until the last result was written.
        busy: share of that time in which each resource worked, over all devices and cores.
    """

    seconds: float
    busy: dict[str, float]

    @property
    def limit(self) -> str:
        """The resource that was busiest."""
        return max(self.busy, key=lambda name: self.busy[name])


def simulate(pieces: Iterable[Work], workers: int, bandwidth: float, *, ahead: bool = False) -> Outcome:
    """Run pieces on workers.

    Args:
        pieces: in the order in which they are handed out.
        workers: number of them.
        bandwidth: of the shared disk or network, bytes per second.
        ahead: whether a worker has two pieces at a time, in different steps.

    Raises:
        ValueError: there are no workers, or the bandwidth is not positive.
    """
    if workers < 1 or not bandwidth > 0:
        raise ValueError(f"`workers` and `bandwidth` must be positive, got {workers}, {bandwidth}")
    waiting, order = iter(pieces), itertools.count()
    # For every piece under way: when its last step ended, whose it is, and which steps are left.
    underway: list[tuple[float, int, int, list[tuple[str, float]]]] = [
        (0.0, next(order), worker, []) for _ in range(2 if ahead else 1) for worker in range(workers)
    ]
    free: dict[tuple[str, int], float] = defaultdict(float)
    used, end = dict.fromkeys((DEVICE, CORE, SHARED), 0.0), 0.0
    while underway:
        now, _, worker, steps = heapq.heappop(underway)
        if not steps:
            work = next(waiting, None)
            if work is None:
                continue
            read, write = work.read / bandwidth, work.write / bandwidth
            steps = [(SHARED, read), (DEVICE, work.compute), (CORE, work.prepare), (SHARED, write)]
            # Who reads nothing does not wait for those who write.
            steps = [step for step in steps if step[1]]
            heapq.heappush(underway, (now, next(order), worker, steps))
            continue
        (resource, seconds), *left = steps
        owner = resource, -1 if resource == SHARED else worker
        # Served in the order in which they ask.
        free[owner] = max(now, free[owner]) + seconds
        used[resource] += seconds
        end = max(end, free[owner])
        heapq.heappush(underway, (free[owner], next(order), worker, left))
    shares = {DEVICE: workers, CORE: workers, SHARED: 1}
    return Outcome(end, {name: seconds / shares[name] / end if end else 0.0 for name, seconds in used.items()})
