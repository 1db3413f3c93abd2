"""Stream-K and split-KV schedules: how the kernels that read contexts distribute their work over programs."""

from __future__ import annotations

import functools
from typing import NamedTuple

_MAX_PARTS = 64
# Time that a program with a single query takes before the first block of an item, and how much longer it takes for
# each program on its multiprocessor, relative to reading a block; fitted to measured times.
_START, _CROWDING = 0.6, 0.08


class StreamKSchedule(NamedTuple):
    """Numbers of blocks that programs read. An item is a tile of queries of one head of one context.

    The blocks of all items, in order, are distributed in runs of `per_program`.

    Attributes:
        blocks: counted per item: those there are, at least one, or more of them, so that no program reads two items.
        per_program: that each program reads.
        max_parts: the largest number of programs that read an item.
    """

    blocks: int
    per_program: int
    max_parts: int

    @classmethod
    def of(cls, blocks: int, per_program: int) -> StreamKSchedule:
        """The schedule of so many blocks."""
        if blocks % per_program == 0 or per_program % blocks == 0:
            return cls(blocks, per_program, -(-blocks // per_program))
        return cls(blocks, per_program, -(-(blocks - 1) // per_program) + 1)

    def programs(self, items: int) -> int:
        """Number of programs that read so many items."""
        return -(-items * self.blocks // self.per_program)

    @property
    def starts(self) -> int:
        """The largest number of items of which a program reads blocks."""
        if self.blocks % self.per_program == 0 or self.per_program % self.blocks == 0:
            return -(-self.per_program // self.blocks)
        return (self.per_program - 2) // self.blocks + 2

    def cost(self, items: int, multiprocessors: int) -> float:
        """Estimated time of a program, in units of a block that it reads while no other program is running."""
        load = self.programs(items) / multiprocessors
        return _START * self.starts * (1 + load) + self.per_program * (1 + _CROWDING * load)


@functools.lru_cache(maxsize=4096)
def best_schedule(items: int, blocks: int, programs: int, multiprocessors: int, single: bool) -> StreamKSchedule:
    """The schedule that takes the least time; it depends on shapes and the device alone, never on lengths.

    Args:
        items: to be read.
        blocks: of each.
        programs: that run at the same time.
        multiprocessors: of the device.
        single: whether items have a single query. The others are distributed evenly over all programs: the estimate was
            not made for them.
    """
    blocks = max(1, blocks)
    even = max(1, -(-items * blocks // programs))
    while StreamKSchedule.of(blocks, even).max_parts > _MAX_PARTS:
        even += 1
    found = [StreamKSchedule.of(blocks, even)]
    if single and 0 < items <= programs:
        for parts in range(1, min(blocks, _MAX_PARTS, programs // items) + 1):
            share = -(-blocks // parts)
            found.append(StreamKSchedule.of(-(-blocks // share) * share, share))
    return min(found, key=lambda schedule: schedule.cost(items, multiprocessors))
