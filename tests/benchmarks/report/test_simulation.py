"""The simulation of workers: cases whose result is known, and bounds that hold for all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report.simulation import CORE, DEVICE, SHARED, Work, simulate


def test_one_worker_does_one_thing_after_another() -> None:
    run = simulate([Work(10, 2, 3, 20)] * 4, 1, bandwidth=10)
    assert run.seconds == 4 * (1 + 2 + 3 + 2)
    assert run.busy == {DEVICE: 8 / 32, CORE: 12 / 32, SHARED: 12 / 32}
    assert run.limit in (CORE, SHARED)


def test_a_worker_that_looks_ahead_computes_while_it_writes() -> None:
    pieces = [Work(0, 2, 3, 0)] * 5
    assert simulate(pieces, 1, 1.0).seconds == 25
    # After the first computation, the core never waits.
    assert simulate(pieces, 1, 1.0, ahead=True).seconds == 2 + 5 * 3


def test_workers_share_the_pieces_and_wait_for_the_network() -> None:
    assert simulate([Work(0, 1, 0, 0)] * 8, 4, 1.0).seconds == 2
    # Two workers: the network serves one after the other, and is the limit.
    run = simulate([Work(0, 1, 0, 1)] * 8, 2, 1.0)
    assert run.seconds == 1 + 8 and run.limit == SHARED
    assert simulate([], 3, 1.0).seconds == 0


@pytest.mark.parametrize(("workers", "bandwidth"), [(0, 1.0), (1, 0.0), (1, math.nan)])
def test_impossible_machines_are_refused(workers: int, bandwidth: float) -> None:
    with pytest.raises(ValueError, match="`workers` and `bandwidth` must be positive"):
        simulate([], workers, bandwidth)


@given(
    st.lists(st.tuples(*[st.floats(0, 9)] * 4), min_size=1, max_size=20),
    st.integers(1, 5),
    st.floats(0.5, 10),
    st.booleans(),
)
def test_no_run_is_faster_than_its_resources_or_slower_than_one_thing_at_a_time(
    pieces: list[tuple[float, float, float, float]], workers: int, bandwidth: float, ahead: bool
) -> None:
    works = [Work(*piece) for piece in pieces]
    run = simulate(works, workers, bandwidth, ahead=ahead)
    moved = sum(work.read + work.write for work in works) / bandwidth
    computed, prepared = sum(work.compute for work in works), sum(work.prepare for work in works)
    assert run.seconds <= (moved + computed + prepared) * (1 + 1e-9) + 1e-9
    assert run.seconds >= max(moved, computed / workers, prepared / workers) * (1 - 1e-9)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in run.busy.values())
