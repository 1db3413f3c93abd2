"""Costs of whole databases: their sizes, and rates that come from the results."""

from __future__ import annotations

import pytest

from benchmarks.harness import stored
from benchmarks.report import costs
from benchmarks.report.costs import HUMAN, SWISS_PROT, TARGETS, UNIREF50, rates, tasks


@pytest.mark.parametrize("database", [SWISS_PROT, UNIREF50, HUMAN, TARGETS])
@pytest.mark.parametrize("pieces", [7, 1000])
def test_lengths_have_the_mean_of_the_database(database: costs.Database, pieces: int) -> None:
    lengths = database.lengths(pieces)
    assert sum(lengths) / pieces == pytest.approx(database.mean)
    assert min(lengths) > 0 and max(lengths) > 2 * min(lengths)


def test_rates_are_those_of_the_results() -> None:
    found = rates()
    newest = stored.newest(
        "speed", lambda figures: figures["case"] if figures["benchmark"] == "calls_cuda" else None, "gpu"
    )["embedding, batches of 16384 tokens"]
    assert found["embed"].value == newest["figures"]["per_second"]["turbo.embed, mean"]
    assert found["embed"].record == newest and found["embed"].unit == "residues/s"
    # 33 layers of keys and values of 1,280 components at 3 bits and a scale per 64, or so.
    assert 33 * 2 * 1280 * 3 / 8 < found["context, turbo3"].value < 33 * 2 * 1280 * 3.1 / 8
    for rate in found.values():
        assert rate.value > 0 and rate.record["revision"]["commit"]


def test_rows_of_another_model_or_none_are_refused() -> None:
    with pytest.raises(LookupError, match="holds no records of speed"):
        costs._row("gpu", "calls_cuda", "embedding, batches of 7 tokens")
    with pytest.raises(LookupError, match=r"cpu\.jsonl: means of 1280 of means_output is of none, not 650M"):
        costs._row("cpu", "means_output", "means of 1280")


def test_tasks_add_up_to_the_database() -> None:
    measured = rates()
    for task in tasks(measured):
        works = list(task.pieces(100))
        read = sum(work.read for work in works)
        # Sequences are read at the beginning of a run; contexts of a store are not.
        tokens = task.database.residues + task.database.proteins
        assert read == pytest.approx(tokens * measured["context, turbo3"].value if "--store" in task.name else 0)
    embed = tasks(measured)[0]
    expected = SWISS_PROT.residues / measured["embed"].value
    # Longer proteins than those that were measured cost a little more.
    assert expected < sum(work.compute for work in embed.pieces()) < 1.1 * expected


def test_more_devices_never_take_longer() -> None:
    for task in tasks():
        seconds = [task.run(count, 1.25e9).seconds for count in (1, 2, 8)]
        assert seconds[0] >= seconds[1] * (1 - 1e-9) >= seconds[2] * (1 - 2e-9)
