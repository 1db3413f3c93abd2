"""Tables of costs: the units, and the rows that they name."""

from __future__ import annotations

import pytest

from benchmarks.report import tables_costs
from benchmarks.report.costs import rates, tasks


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0.0 B"), (999, "999 B"), (4770, "4.8 kB"), (6.7e12, "6.7 TB"), (6.54e17, "654 PB")]
)
def test_bytes_are_in_units_of_a_thousand(size: float, words: str) -> None:
    assert tables_costs._bytes(size) == words


@pytest.mark.parametrize(("seconds", "words"), [(36, "0.01"), (3600, "1.0"), (3600 * 1234, "1,234")])
def test_hours(seconds: float, words: str) -> None:
    assert tables_costs._hours(seconds) == words


def test_hours_of_one_and_of_eight_devices_on_both_networks() -> None:
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables_costs.costs().splitlines()]
    for row, task in zip(rows, tasks(), strict=False):
        found = dict(zip(head, row, strict=True))
        for workers, noun in ((1, "1 device"), (8, "8 devices")):
            for gigabits in (10, 100):
                expected = tables_costs._hours(task.run(workers, gigabits * 1e9 / 8).seconds)
                assert found[f"{noun}, {gigabits} Gbit/s: hours"] == expected, task.name


def test_every_task_and_rate_has_a_row() -> None:
    assert len(tables_costs.costs().splitlines()) == 2 + len(tasks()) + 2
    lines = tables_costs.cost_rates().splitlines()
    assert len([line for line in lines if "benchmarks/results/" in line]) == len(rates())
    assert all("commit " in line for line in lines[2:] if line)
