"""Joining the shards of a run into the output that one run would have written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from esm_turbo.files.kinds import STORE_FILE
from esm_turbo.files.writing import link_file, only_writer
from esm_turbo.parallel.shards import Manifest, ShardError, ShardsState, results_file, shard_output, shards_folder
from esm_turbo.store.files import StoreFiles
from esm_turbo.store.partitions import PARTITION_FILE
from esm_turbo.tasks.common.run_info import RunInfo
from esm_turbo.tasks.embedding.folder import merge_folders
from esm_turbo.tasks.embedding.one_file import merge_files
from esm_turbo.tasks.scoring.records import ScoringRun
from esm_turbo.tasks.scoring.screens import compare
from esm_turbo.tasks.variants.records import VariantsRun


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
    # A shard without any record of its own may have written nothing.
    manifests = [manifest for _, manifest in sorted(state.manifests.items()) if manifest.files]
    if not manifests:
        raise ShardError(f"{folder}: no shard has any results")
    paths = [shard_output(out, one.shard, one.kind) for one in manifests]
    orders = [one.order for one in manifests]
    match manifests[0].kind:
        case "table":
            _merge_tables(out, manifests)
        case "embeddings":
            merge_folders(out, paths, orders)
        case "HDF5":
            merge_files("h5", out, paths, orders)
        case "Parquet":
            merge_files("parquet", out, paths, orders)
        case "contexts":
            _merge_stores(out, paths)


def _merge_tables(out: Path, manifests: Sequence[Manifest]) -> None:
    """Write the table of the results of all shards."""
    shards = [json.loads(results_file(out, one.shard).read_text(encoding="utf-8")) for one in manifests]
    kinds: dict[str, type[ScoringRun | VariantsRun]] = {"score": ScoringRun, "variants": VariantsRun}
    run = kinds[manifests[0].command].of_shards(one["results"] for one in shards)
    if isinstance(run, ScoringRun) and shards[0]["compares_targets"]:
        compare(run, "targets")
    if not run.results:
        raise ShardError(f"{shards_folder(out)}: no shard has any results")
    used = [RunInfo(**one.run) for one in manifests]
    devices = " ".join(dict.fromkeys(one.device for one in used))
    run.write(out, replace(used[0], device=devices), shards[0]["settings"])


def _merge_stores(out: Path, parts: Sequence[Path]) -> None:
    """Add the contexts of stores to one, under the names of its own partitions."""
    # First, since the lock would stay in a folder that is refused.
    target = StoreFiles(out)
    with only_writer(out, keep=True):
        target.read_header()
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
