"""Time of the host for eager calls, as far as a machine without a device takes it."""

from __future__ import annotations

import pytest

from benchmarks.cuda import host_time
from benchmarks.cuda.calls import THEIRS
from tests.helpers.benchmark_cases import TINY, measured


def test_time_of_the_host(no_device: None) -> None:
    (case,) = host_time.host_cases(TINY, 30, 5, 0.6)
    figures = measured(case)
    seconds = figures["seconds"]
    assert seconds.keys() == {host_time.EXTENSION, host_time.CALL, THEIRS}
    for arm, times in seconds.items():
        assert figures["ratios"][f"{arm} / {THEIRS}"] == pytest.approx(times["p50"] / seconds[THEIRS]["p50"])
