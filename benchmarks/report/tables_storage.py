"""Tables about embedding many proteins, about the store of contexts, and about where a cache does not pay."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import stored
from benchmarks.harness.names import EMBED, FILE_ORDER, SAME_BATCHES
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import made_by, source, table

_FILES = ("cpu", "gpu")
# Arms of the benchmark of identities.
_IDENTITY = ("opening a store", "looking for changes in the sample, too", "extension")


def embedding_throughput() -> str:
    """Our loop beside plain ones."""
    rows, last = [], None
    for _, record in _speed("embedding_throughput"):
        last = record
        figures = record["figures"]
        shape, rates = figures["shape"], figures["residues_per_second"]
        rows.append(
            [
                f"{record['model']}, {shape['dtype']}",
                str(shape["proteins"]),
                *(f"{rates[arm]:,.0f}" for arm in (FILE_ORDER, SAME_BATCHES, EMBED)),
                f"{1 / figures['ratios'][f'{EMBED} / {SAME_BATCHES}']:.2f}x",
                f"{figures['ratios'][f'{FILE_ORDER} / {EMBED}']:.2f}x",
            ]
        )
    assert last is not None
    head = ["model", "proteins", "residues/s: file order, batches of 8", "same batches as ours", "`turbo.embed`",
            "speedup over the same batches", "speedup over file order"]  # fmt: skip
    return table(head, rows) + source(last, "cpu")


def store_read() -> str:
    """A context from a store beside its prefill."""
    rows, by_file = [], {}
    for file, record in _speed("store_read", "store_read_cuda"):
        by_file[file] = record
        figures = record["figures"]
        seconds = figures["seconds"]
        places = ("prefill", "disk", "host memory", "device memory")
        rows.append(
            [
                f"{record['model']}, {figures['shape']['dtype']}",
                _device(record),
                str(figures["shape"]["residues"]),
                f"{figures['bytes']['cache'] / 2**20:.2f}",
                *(f"{1e3 * seconds[place]['p50']:.1f}" if place in seconds else "" for place in places),
            ]
        )
    head = ["model", "on", "residues", "MiB", "prefill, ms", "disk, ms", "host memory, ms", "device memory, ms"]
    return table(head, rows) + _sources(by_file)


def identity_cost() -> str:
    """Recognising a model: once when a store is opened, and at every call."""
    rows, by_file = [], {}
    for file, record in _speed("identity", "identity_cuda"):
        by_file[file] = record
        shape, seconds = record["figures"]["shape"], record["figures"]["seconds"]
        rows.append(
            [
                f"{record['model']}, {shape['dtype']}",
                _device(record),
                *(f"{1e3 * seconds[arm]['p50']:,.1f}" for arm in _IDENTITY),
                f"{shape['new_residues']} on {shape['context_tokens'] - 1}",
            ]
        )
    head = ["model", "on", "opening a store, ms", "looking for changes at a call, ms", "the call, ms", "residues"]
    return table(head, rows) + _sources(by_file)


def short_contexts() -> str:
    """From which length on a cache pays."""
    rows, last = [], None
    for _, record in _speed("short_contexts"):
        last = record
        figures = record["figures"]
        seconds, count = figures["seconds"], figures["shape"]["candidates"]
        even = figures["break_even_candidates"]
        rows.append(
            [
                str(figures["shape"]["context_residues"]),
                *(f"{count / seconds[arm]['p50']:,.0f}" for arm in ("full", "turbo")),
                f"{figures['ratios']['full / turbo']:.1f}x",
                "never" if even is None else f"{even:.1f}",
            ]
        )
    assert last is not None
    head = ["context residues", "candidates/s, recomputed", "candidates/s, cached", "speedup",
            "candidates to break even"]  # fmt: skip
    return table(head, rows) + source(last, "cpu")


TABLES = {
    "embedding_throughput": embedding_throughput,
    "store_read": store_read,
    "identity_cost": identity_cost,
    "short_contexts": short_contexts,
}


def _speed(*benchmarks: str) -> Iterator[tuple[str, Record]]:
    """The newest record of every case, and the file that it is in."""
    found = 0
    for file in _FILES:
        try:
            records = stored.newest(
                "speed", lambda f: (f["benchmark"], f["case"]) if f["benchmark"] in benchmarks else None, file
            )
        except LookupError:
            continue
        for record in records.values():
            found += 1
            yield file, record
    if not found:
        raise LookupError(f"no records of {', '.join(benchmarks)} in benchmarks/results/")


def _device(record: Record) -> str:
    shape = record["figures"]["shape"]
    threads = record["environment"]["threads"]
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}" if shape["device"] == "cpu" else shape["device_name"]


def _sources(by_file: dict[str, Record]) -> str:
    text = ""
    for file, record in by_file.items():
        processor = record["figures"]["shape"].get("device_name", record["environment"]["processor"])
        text += f"Measured on {processor}, {made_by(record)}; `benchmarks/results/{file}.jsonl`. "
    return text + "Random weights are in the geometry of the published checkpoints.\n"
