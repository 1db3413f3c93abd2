"""Look up the newest stored records; tables and plots are made from these only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from benchmarks.harness import records

Record = dict[str, Any]


def newest(kind: str, key: Callable[[dict[str, Any]], Hashable], file: str | None = None) -> dict[Hashable, Record]:
    """The newest record of every key, in the order in which keys first appear.

    Args:
        kind: of the records.
        key: computes the key of a record from its figures and its `device_name`; None excludes the record.
        file: in benchmarks/results/, without its extension; None for the name of the kind.

    Raises:
        LookupError: there is no record.
    """
    found = {
        key({"device_name": record["environment"].get("device_name"), **record["figures"]}): record
        for record in _read(file or kind, kind)
    }
    found.pop(None, None)
    if not found:
        raise LookupError(f"benchmarks/results/{file or kind}.jsonl holds no records of {kind}")
    return found


def speed(benchmark: str, file: str = "cpu", *, by_device: bool = False) -> list[Record]:
    """The newest record of every case of a benchmark of speed, of each device if `by_device`.

    Raises:
        LookupError: there is no record.
    """

    def key(figures: dict[str, Any]) -> Hashable:
        device = figures["device_name"] if by_device else None
        return (figures["case"], device) if figures["benchmark"] == benchmark else None

    return list(newest("speed", key, file).values())


def accuracy(proteins: str, preset: str, part: str = "leave_one_out") -> Record:
    """The newest record of a preset on a protein set with a given part: `leave_one_out`, `extend` or `memory`.

    Raises:
        LookupError: there is no record.
    """
    found = accuracies(proteins, part)
    if preset not in found:
        raise LookupError(f"no record of {preset} on {proteins} with {part}")
    return found[preset]


def accuracies(proteins: str, part: str = "leave_one_out", kind: str = "accuracy") -> dict[str, Record]:
    """The newest record of every preset on a protein set, see `accuracy`; may be empty.

    Args:
        proteins: name of the set.
        part: see `accuracy`.
        kind: `accuracy` for the small model of ESM-2, `families` for that of ESM-C.
    """
    found = {}
    for record in _read(kind, kind):
        figures = record["figures"]
        preset = figures["preset"]
        if figures["proteins"] == f"{proteins}.fasta" and preset[part]:
            found[preset["name"]] = record
    return found


def forget() -> None:
    """Drop the cached records, so that the files are read again."""
    _read.cache_clear()


@functools.cache
def _read(file: str, kind: str) -> tuple[Record, ...]:
    path = records.RESULTS / f"{file}.jsonl"
    return tuple(records.read(path, kind)) if path.exists() else ()
