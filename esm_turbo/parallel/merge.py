"""Joining the shards of a run into the output that one run would have written."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from esm_turbo.files.csv_files import delimiter_of
from esm_turbo.files.extras import pyarrow
from esm_turbo.files.kinds import STORE_FILE
from esm_turbo.files.parquet import parquet_settings
from esm_turbo.files.safe_text import from_cell
from esm_turbo.files.suffixes import PARQUET
from esm_turbo.files.tables import write_table
from esm_turbo.files.writing import link_file, only_writer
from esm_turbo.parallel.shards import Manifest, ShardError, ShardsState, shard_output, shards_folder
from esm_turbo.store.files import StoreFiles
from esm_turbo.store.partitions import PARTITION_FILE
from esm_turbo.tasks.embedding.folder import merge_folders
from esm_turbo.tasks.embedding.one_file import merge_files
from esm_turbo.tasks.scoring.merging import Row, ranked, with_other_targets
from esm_turbo.tasks.scoring.score import SPECIFICITY_COLUMNS

_Segment = tuple[Sequence[int] | None, list[Row]]
"""Rows of a target in a shard, with the numbers of its candidates if other shards have some, too."""

# Lines that are read of a shard at a time.
_LINES = 1000


def merge(out: str | os.PathLike[str], state: ShardsState) -> None:
    """Join shards. The shards stay as they are.

    Args:
        out: the output to write, see `shards.shards_folder`. Contexts are added to a store that exists.
        state: of the shards.

    Raises:
        ShardError: a shard is missing or damaged, or does not belong to the others.
        ValueError: the output exists and is of another kind or model.
        OSError: it cannot be written.
    """
    out, folder = Path(out), shards_folder(out)
    if not state.is_complete:
        missing = ", ".join(f"{number}/{state.of}" for number in state.missing)
        lacks = [f"shard {missing} is missing"] if len(state.missing) == 1 else [f"shards {missing} are missing"]
        raise ShardError(f"{folder}: cannot be merged: {'; '.join([*state.problems, *(lacks if missing else [])])}")
    manifests = [manifest for _, manifest in sorted(state.manifests.items())]
    # A shard without any record of its own may have written nothing.
    parts = [(manifest, shard_output(out, manifest.shard, manifest.kind)) for manifest in manifests if manifest.files]
    if not parts:
        raise ShardError(f"{folder}: no shard has any results")
    orders = [[number for number, _ in manifest.order] for manifest, _ in parts]
    match parts[0][0].kind:
        case "table":
            _merge_tables(out, parts, state)
        case "embeddings":
            merge_folders(out, [path for _, path in parts], orders)
        case "HDF5":
            merge_files("h5", out, [path for _, path in parts], orders)
        case "Parquet":
            merge_files("parquet", out, [path for _, path in parts], orders)
        case "contexts":
            _merge_stores(out, [path for _, path in parts])


def _merge_tables(out: Path, parts: Sequence[tuple[Manifest, Path]], state: ShardsState) -> None:
    """Join tables in the order of the input; candidates of one target in several shards are ranked together."""
    opened = [_read(path) for _, path in parts]
    columns, types, metadata, _ = opened[0]
    for (manifest, _), (others, *_) in zip(parts, opened, strict=True):
        if others != columns:
            raise ShardError(f"shard {manifest.shard} has the columns {', '.join(others)}, not {', '.join(columns)}")
    where: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for part, (manifest, _) in enumerate(parts):
        for number, count in manifest.order:
            where[number].append((part, count))
    failed, settings = {one.record for one in state.failed}, parts[0][0].settings

    def targets() -> Iterator[list[_Segment]]:
        for number in sorted(where):
            segments: list[_Segment] = [
                (parts[part][0].partial.get(str(number)), list(islice(opened[part][3], count)))
                for part, count in where[number]
            ]
            # A target that failed in one shard would have failed as a whole.
            if (len(segments) == 1 and segments[0][0] is None) or segments[0][1][0][0] not in failed:
                yield segments

    # Of each target, the specificity needs the scores on all others.
    later = settings.get("background") == "targets" and SPECIFICITY_COLUMNS[0] in columns

    def rows() -> Iterator[Row]:
        found: Iterable[list[_Segment]] = targets()
        if later:
            found = list(found)
            with_other_targets(columns, settings, [[row for _, own in segments for row in own] for segments in found])
        for segments in found:
            if segments[0][0] is None and not later:
                yield from segments[0][1]
                continue
            # A target of one shard has its candidates in the order of the input, or is ranked by likelihood.
            arms = len({row[columns.index("arm")] for row in segments[0][1]})
            numbered = [(range(len(own) // arms) if n is None else n, own) for n, own in segments]
            yield from ranked(columns, settings, numbered)

    write_table(out, columns, rows(), types, metadata)


def _read(path: Path) -> tuple[list[str], dict[str, Any], dict[str, Any], Iterator[Row]]:
    """Columns of a table, types of those that hold numbers, its metadata, and its rows."""
    if path.suffix.lower() == PARQUET:
        # In memory, compressed: there may be more shards than files that a process may open.
        content = pyarrow().BufferReader(path.read_bytes())
        file = pyarrow().parquet.ParquetFile(content, page_checksum_verification=True)
        schema = file.schema_arrow
        kinds = {"int64": int, "double": float}
        types = {field.name: kinds[str(field.type)] for field in schema if str(field.type) in kinds}
        rows = (list(row) for batch in file.iter_batches() for row in zip(*(c.to_pylist() for c in batch), strict=True))
        settings = parquet_settings(path)
        settings.pop("esm_turbo", None)
        return list(schema.names), types, settings, rows
    lines = csv.reader(_lines(path), delimiter=delimiter_of(path), strict=True)
    columns = next(lines)
    return columns, {}, {}, ([from_cell(text) for text in row] for row in lines)


def _lines(path: Path) -> Iterator[str]:
    """Lines of a file that is open only while some are read."""
    position, lines = 0, list[str]([""])
    while lines:
        with path.open(encoding="utf-8", newline="") as file:
            file.seek(position)
            lines = list(islice(iter(file.readline, ""), _LINES))
            position = file.tell()
        yield from lines


def _merge_stores(out: Path, parts: Sequence[Path]) -> None:
    """Add the contexts of stores to one, under the names of its own partitions."""
    with only_writer(out, keep=True):
        target = StoreFiles(out)
        for path in parts:
            source = StoreFiles(path)
            if source.header is None:
                continue
            if target.header is None:
                link_file(path / STORE_FILE, out / STORE_FILE)
                target.read_header()
            assert target.header is not None
            target.header.check(source.header, out)
            for partition in source.partitions():
                own = target.like(partition)
                if own is None:
                    link_file(partition.folder / PARTITION_FILE, out / partition.name / PARTITION_FILE)
                    own = target.like(partition)
                    assert own is not None
                for key in partition.keys():  # noqa: SIM118 - not a mapping
                    if own.path(key).exists():
                        continue
                    if own.name == partition.name:
                        link_file(partition.path(key), own.path(key))
                    else:
                        context = partition.read_context(key)
                        assert context is not None
                        own.write_context(key, context)
