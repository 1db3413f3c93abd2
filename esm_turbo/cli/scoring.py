"""Steps that `esm-turbo score` and `esm-turbo variants` share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.cli.console import progress_bar, save, say, show
from esm_turbo.cli.inputs import check_minimum, list_bad, opened_store, outcome
from esm_turbo.cli.parallel import Spread
from esm_turbo.cli.pictures import save_plot
from esm_turbo.cli.report import failures
from esm_turbo.cli.sharding import Sharding
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord

if TYPE_CHECKING:
    from esm_turbo.files.journal import Journal
    from esm_turbo.tasks.common.options import Arm
    from esm_turbo.tasks.common.record_results import RecordRun
    from esm_turbo.tasks.common.run_info import RunInfo
    from esm_turbo.turbo_esm import TurboEsm


def check_options(
    arm: tuple[Arm, ...] | None, refresh: int, top: int | None, toks_per_batch: int | None, **positive: int | None
) -> None:
    """Check options of these names, and others that are at least 1.

    Raises:
        ValueError: one is too small, or no arm is named.
    """
    check_minimum(0, refresh=refresh, top=top)
    check_minimum(1, toks_per_batch=toks_per_batch, **positive)
    if arm == ():
        raise ValueError("--arm must name at least one arm")


@contextlib.contextmanager
def running(
    spread: Spread[Any],
    turbo: TurboEsm,
    store: Path | None,
    journal: Journal | None,
    units: str,
    stages: Mapping[str, int | None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Where records are scored, and what is kept of it: arguments of `score_records`.

    Args:
        units: of progress, as are `stages`, see `progress_bar`.

    Raises:
        ValueError: the model is another one at the end, in another stage than the first perhaps.
    """
    from esm_turbo.files.identity import exact_identity
    from esm_turbo.tasks.common.same_model import refuse_changed

    begun = exact_identity(turbo.model)
    opened = opened_store(store, turbo, alone=spread.devices is None)
    with opened as contexts, spread.runner() as runner, progress_bar(units, stages) as progress:
        yield {"store": contexts, "runner": runner, "progress": progress, "journal": journal}
    refuse_changed(turbo, begun)


def write_results(
    run: RecordRun[Any],
    used: RunInfo,
    settings: Mapping[str, Any],
    sharding: Sharding,
    records: Sequence[ProteinRecord],
    *,
    compares_targets: bool = False,
) -> None:
    """Write the table of a run, if it has a file and any results, and what is needed to merge that of a shard.

    Args:
        run: its results.
        used: what it used.
        settings: its options, JSON values.
        sharding: of its output.
        records: all that could be read, in the order of their file.
        compares_targets: whether the targets of all shards are still to be compared.
    """
    if sharding.out is not None and run.results:
        save(partial(run.write, run=used, settings=settings), sharding.out)
        if left_out := ", ".join(run.left_out()):
            say(f"left out of {sharding.out}, whose own columns have these names: {left_out}; rename them to keep them")
    about = {"settings": settings, "compares_targets": compares_targets}
    sharding.keep(lambda: about | {"results": run.to_state(records)})


def conclude(
    run: RecordRun[Any],
    used: RunInfo,
    sharding: Sharding,
    bad: Sequence[tuple[Path | None, Sequence[BadRecord]]],
    report: Sequence[object],
    noun: str,
    *,
    plot: Path | None,
    json: str | None,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Draw, list and print what a run has found, whose table is written; returns the exit code.

    Args:
        run: its results.
        used: what it used.
        sharding: of its output.
        bad: records that could not be read, by their file; that of the proteins first.
        report: what is printed.
        noun: for a row of the table.
        plot: where its picture goes.
        json: where its JSON goes.
        more: what else it used, for the JSON.
    """
    (path, unread), *others = bad
    listed = [(path, [*unread, *run.failed]), *others]
    failed = [one for _, own in listed for one in own]
    sharding.finish(used, failed)
    for source, own in listed:
        if source is not None:
            list_bad(source, own)
    result = {
        "run": used.to_dict() | dict(more or {}),
        "results": [one.to_dict() for one in run.results],
        "failed": failures(failed),
    }
    rows = sum(1 for one in run.results for _ in one.given())
    show(*report, *outcome(rows, noun, sharding.out, failed), to_json=json, result=result)
    save_plot(plot, run, used)
    return sharding.exit_code(failed)
