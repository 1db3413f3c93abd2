"""`esm-turbo merge`."""

from __future__ import annotations

from pathlib import Path

from esm_turbo.cli.console import say, show
from esm_turbo.cli.options import JsonFile
from esm_turbo.cli.report import failures
from esm_turbo.files.paths import Output, check_outputs


def merge(out: Path, /, *, json: JsonFile = None) -> int:
    """Join the shards of an output into what one run would have written.

    Shards of different settings, models or inputs, missing and damaged ones are refused. The shards stay; remove
    their folder afterwards. Records that failed in any shard are listed, and the exit code is then 1.

    Args:
        out: The output that the shards were given. Embeddings and contexts are added to what is there; a table is
            replaced.
    """
    from esm_turbo.parallel.merge import merge as join
    from esm_turbo.parallel.shards import shards_state

    state = shards_state(out)
    for first in list(state.manifests.values())[:1]:
        check_outputs([Output(out, "text" if first.kind == "table" else first.kind)], [])
    join(out, state)
    for one in state.failed:
        say(f"error: record {one.record!r}: {one.reason}")
    result = {"out": str(out), "shards": state.of, "failed": failures(state.failed)}
    show(f"{state.of} shards merged into {out}", to_json=json, result=result)
    return 1 if state.failed else 0
