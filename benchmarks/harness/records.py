"""Results as JSON lines: one measurement per line with its environment, never overwritten."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.environment import device_name, processor_name, source_revision
from esm_turbo.files.artifacts import package_versions

RESULTS = Path(__file__).resolve().parents[1] / "results"
FORMAT_VERSION = 1
REVISION_VARIABLE = "ESM_TURBO_REVISION"
"""Names the commit if the sources are a copy without history."""
_FIELDS = ("format_version", "kind", "date", "revision", "environment", "model", "figures")


def append(
    path: str | os.PathLike[str],
    kind: str,
    figures: Mapping[str, Any],
    *,
    model: str | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Append one measurement to a JSON lines file, created if missing.

    Args:
        path: the file, usually in `RESULTS`.
        kind: of the measurement, such as "accuracy" or "speed"; readers select by it.
        figures: the result as JSON values without NaN, including shapes, dtypes and units.
        model: name of the measured model.
        device: of the measurement.

    Returns:
        The record as written.

    Raises:
        ValueError: `figures` contains NaN or infinity, or `kind` is empty.
        TypeError: `figures` contains a value that JSON does not support.
    """
    if not kind:
        raise ValueError("`kind` must say what was measured")
    record = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _revision(),
        "environment": environment(device),
        "model": model,
        "figures": dict(figures),
    }
    line = json.dumps(record, allow_nan=False, sort_keys=True) + "\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A single write per line: processes that append to the same file do not mix their lines.
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())
    written: dict[str, Any] = json.loads(line)
    return written


def read(path: str | os.PathLike[str], kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a file, in its order.

    Args:
        path: a file written by `append`.
        kind: of the records to return; None for all.

    Raises:
        ValueError: a line is not a record, or of another format version; the message names file and line.
    """
    return [record for record in _records(path) if kind is None or record["kind"] == kind]


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Machine and packages: device, processor, cores, threads, versions."""
    versions = package_versions()
    for name in ("triton", "biopython"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": str(torch.device(device)),
        "device_name": device_name(device),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        # Without the release: its name may be that of a private machine.
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def _revision() -> dict[str, Any] | None:
    """Revision of the checkout, or else of the environment variable ("COMMIT" or "COMMIT dirty")."""
    revision = source_revision()
    if revision is not None:
        return revision
    commit, _, rest = os.environ.get(REVISION_VARIABLE, "").partition(" ")
    return {"commit": commit, "dirty": rest == "dirty"} if commit else None


def _records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{os.fspath(path)}, line {number}: not JSON ({error.msg})") from None
            missing = [name for name in _FIELDS if not isinstance(record, dict) or name not in record]
            if missing:
                raise ValueError(f"{os.fspath(path)}, line {number}: lacks {', '.join(missing)}")
            if record["format_version"] != FORMAT_VERSION:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: format version {record['format_version']},"
                    f" this reads {FORMAT_VERSION}"
                )
            yield record
