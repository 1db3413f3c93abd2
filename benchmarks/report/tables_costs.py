"""Tables of what runs over whole databases cost."""

from __future__ import annotations

from benchmarks.report.costs import HUMAN, SWISS_PROT, UNIREF50, Rate, Task, rates, tasks
from benchmarks.report.markdown import table

# Line rates of Ethernet, bytes per second.
_SLOW, _FAST = 1.25e9, 12.5e9
_HOUR = 3600
_WORKERS = 8
# Part of the speed of as many devices with a network each below which more are of little use, and the most tried.
_USEFUL, _MOST = 0.8, 256
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def costs() -> str:
    """Hours of one device and of eight, on two networks."""
    rows = []
    for task in tasks():
        pieces = list(task.pieces())
        alone = sum(one.compute for one in pieces)
        runs = [task.run(workers, band) for workers in (1, _WORKERS) for band in (_SLOW, _FAST)]
        slow = runs[2]
        rows.append(
            [
                task.name,
                task.database.name,
                _hours(alone),
                *(_hours(run.seconds) for run in runs),
                f"{slow.limit} ({slow.busy[slow.limit]:.0%})",
                *(_useful(task, band) for band in (_SLOW, _FAST)),
                _bytes(sum(one.write for one in pieces)),
            ]
        )
    head = [
        "task", "of", "computing alone, device hours", "1 device, 10 Gbit/s: hours", "1 device, 100 Gbit/s: hours",
        "8 devices, 10 Gbit/s: hours", "8 devices, 100 Gbit/s: hours", "busiest with 8 at 10 Gbit/s",
        "devices of use at 10 Gbit/s", "at 100 Gbit/s", "written",
    ]  # fmt: skip
    return table(head, rows) + _source(rates()["embed"])


def cost_tiers() -> str:
    """Bytes of contexts by database, and what holds them."""
    rate, rows = rates(), []
    free = rate["device memory"].value - rate["model"].value
    for database in (HUMAN, SWISS_PROT, UNIREF50):
        for preset in ("turbo3", "turbo2"):
            size = rate[f"context, {preset}"].value * (database.residues + database.proteins)
            rows.append(
                [
                    f"contexts of {database.name}",
                    preset,
                    _bytes(size / database.proteins),
                    _bytes(size),
                    f"{size / free:,.1f}",
                    _hours(size / _SLOW),
                    f"{size / database.proteins / _SLOW * 1000:.1f} ms",
                ]
            )
    head = ["what", "preset", "each", "all", "H200s whose memory holds them", "10 Gbit/s: hours", "each"]
    return table(head, rows) + _source(rate["device memory"])


def cost_rates() -> str:
    """The measured rates, by name of their rows."""
    rows = [
        [
            name,
            _figure(rate),
            f"{rate.what}; `benchmarks/results/{rate.file}.jsonl`, commit {_commit(rate)}{_load(rate)}",
        ]
        for name, rate in rates().items()
    ]
    return table(["used for", "measured", "row"], rows)


def cost_databases() -> str:
    """Sizes of the databases, which are not measured."""
    rows = [
        [one.name, f"{one.proteins:,}", f"{one.mean:,.0f}", f"{one.residues / 1e6:,.0f} M", one.source]
        for one in (SWISS_PROT, UNIREF50, HUMAN)
    ]
    return table(["set", "proteins", "mean length", "residues", "source"], rows)


def _useful(task: Task, bandwidth: float) -> str:
    """How many devices are at least at 80 % of the speed of as many with a network each, in powers of two."""
    count, alone = 1, task.run(1, bandwidth).seconds
    while count < _MOST and alone / task.run(2 * count, bandwidth).seconds >= _USEFUL * 2 * count:
        count *= 2
    return f"{count:,}" if count < _MOST else f"{count:,} or more"


def _figure(rate: Rate) -> str:
    if rate.unit == "s":
        return f"{rate.value * 1000:.2f} ms"
    return f"{_bytes(rate.value)}{rate.unit[5:]}" if rate.unit.startswith("bytes") else f"{rate.value:,.0f} {rate.unit}"


def _hours(seconds: float) -> str:
    hours = seconds / _HOUR
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"


def _bytes(size: float) -> str:
    """Bytes in units of a thousand, as networks and disks are sold."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.1f} {unit}"


def _load(rate: Rate) -> str:
    """That the machine of a measurement did other work; empty if it did not."""
    load, cores = rate.record["figures"]["load_average_before"], rate.record["environment"]["cores"]
    return f"; the machine had a load of {load:.0f} on {cores} cores" if load > cores else ""


def _commit(rate: Rate) -> str:
    return str(rate.record["revision"]["commit"][:10])


def _source(rate: Rate) -> str:
    where = rate.record["environment"]
    return (
        f"Simulated from rates measured with random weights in the geometry of ESM-2 650M, bfloat16, on one"
        f" {where['device_name']} (torch {where['versions']['torch']}), and for writing means on a CPU, see the rates"
        " on this page; `benchmarks/report/simulation.py`, `benchmarks/report/costs.py`.\n"
    )


TABLES = {"costs": costs, "cost_tiers": cost_tiers, "cost_rates": cost_rates, "cost_databases": cost_databases}
