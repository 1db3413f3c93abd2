"""How blocks of contexts are distributed over programs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.ops.stream_k import best_schedule


@given(items=st.integers(1, 300), blocks=st.integers(0, 600), programs=st.integers(1, 3000), single=st.booleans())
def test_there_is_room_for_the_parts_of_every_item(items: int, blocks: int, programs: int, single: bool) -> None:
    shares = best_schedule(items, blocks, programs, 132, single)
    assert shares.blocks >= max(1, blocks)
    assert 1 <= shares.max_parts <= 64
    count = shares.programs(items)
    assert count <= programs
    starts = [0] * count
    for item in range(items):
        first, last = item * shares.blocks // shares.per_program, ((item + 1) * shares.blocks - 1) // shares.per_program
        assert last - first + 1 <= shares.max_parts
        for program in range(first, last + 1):
            starts[program] += 1
    assert min(starts) >= 1
    assert max(starts) <= shares.starts


def test_more_blocks_are_counted_than_there_are_if_no_program_then_reads_two_items() -> None:
    shares = best_schedule(100, 13, 300, 132, True)
    assert shares == (15, 5, 3)
    assert shares.starts == 1
    assert shares.programs(100) == 300
    # Several queries are distributed evenly.
    assert best_schedule(100, 13, 300, 132, False) == (13, 5, 4)


def test_no_items_have_a_schedule() -> None:
    for single in (True, False):
        assert best_schedule(0, 13, 300, 132, single).programs(0) == 0
