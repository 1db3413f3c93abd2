"""`esm-turbo status`."""

from __future__ import annotations

import os
from pathlib import Path

from esm_turbo.cli.console import say, show
from esm_turbo.cli.options import JsonFile
from esm_turbo.cli.report import failures


def status(out: Path, /, *, json: JsonFile = None) -> int:
    """Say which shards of an output are there, missing or damaged.

    All files are read and compared with the hashes of the shards' manifests. The exit code is 0 if merge would succeed
    and no record has failed, and else 1.

    Args:
        out: The output that the shards were given.
    """
    from esm_turbo.files.tabular import counted
    from esm_turbo.parallel.shards import shards_folder, shards_state

    state = shards_state(out)
    for problem in state.problems:
        say(f"error: {problem}")
    for one in state.failed:
        say(f"error: record {one.record!r}: {one.reason}")
    missing = ", ".join(map(str, state.missing))
    lines = [f"{len(state.manifests)} of {state.of} shards in {shards_folder(out)} are done"]
    lines += [f"missing: {missing}"] if missing else []
    lines += [counted(len(state.problems), "problem")] if state.problems else []
    lines += [f"{counted(len(state.failed), 'record')} failed"] if state.failed else []
    result = {
        "out": os.fspath(out),
        "shards": state.of,
        "done": sorted(state.manifests),
        "missing": state.missing,
        "problems": state.problems,
        "failed": failures(state.failed),
    }
    show("; ".join(lines), to_json=json, result=result)
    return 0 if state.is_complete and not state.failed else 1
