"""`esm-turbo store`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from esm_turbo.cli.console import progress_bar, show
from esm_turbo.cli.homologs import DrawnHomologs, FamilyOptions
from esm_turbo.cli.inputs import announce, check_minimum, list_bad, read_proteins, readable
from esm_turbo.cli.interrupts import interrupts
from esm_turbo.cli.options import (
    CacheOptions,
    InputFile,
    JsonFile,
    ParallelOptions,
    ProteinBatchTokens,
    SequenceOptions,
    Writes,
)
from esm_turbo.cli.parallel import Spread
from esm_turbo.cli.report import bytes_text, failures
from esm_turbo.cli.sharding import Sharding, model_settings
from esm_turbo.files.tabular import counted
from esm_turbo.proteins.fasta import BadRecord


def store(
    proteins: InputFile,
    folder: Annotated[Path, Writes("contexts")],
    /,
    *,
    toks_per_batch: ProteinBatchTokens = None,
    json: JsonFile = None,
    homologs: FamilyOptions = FamilyOptions(),
    letters: SequenceOptions = SequenceOptions(),
    model: CacheOptions = CacheOptions(),
    parallel: ParallelOptions = ParallelOptions(),
) -> int:
    """Add compressed contexts of proteins to a store.

    Contexts that the store already holds are not computed again: after an interruption, the same command continues
    where it stopped. Bad records are reported at the end; all others are stored. They serve generate --max-new-tokens,
    embed --include cache and score --place empty; score and variants add those that they need to a --store themselves.

    With --homologs, what is stored is contexts of E1, drawn as by variants with the same options; their ids, with which
    a service is asked, are printed.

    Args:
        proteins: FASTA file, plain or gzip; with --homologs, of the protein whose family it is.
        folder: Folder of the store, created if needed.
    """
    spread = Spread.of(parallel, model)
    check_minimum(1, toks_per_batch=toks_per_batch)
    sharding = Sharding("store", "contexts", parallel.shard, folder, [proteins, homologs.homologs])
    assert sharding.out is not None
    good, bad = read_proteins(proteins, letters)
    drawn = DrawnHomologs.of(homologs, good, letters.unknown)
    turbo = spread.load()
    drawn.check_model(turbo)
    good = drawn.records or readable(turbo, proteins, good, bad)
    from esm_turbo.context_store import ContextStore, context_key
    from esm_turbo.parallel.storing import store_sequences
    from esm_turbo.tasks.common.forwards import protein_tokens
    from esm_turbo.tasks.common.run_info import context_arm

    toks_per_batch = protein_tokens(toks_per_batch, turbo, spread.devices)
    settings = {"toks_per_batch": toks_per_batch, **asdict(letters)} | drawn.to_dict()
    if sharding.is_done(lambda: model_settings(turbo, [context_arm(turbo)]) | settings):
        return 0
    failed: dict[str, str] = {}
    # Nothing reads the contexts afterwards, so none is kept in memory.
    with (
        ContextStore(sharding.out, host_bytes=0, device_bytes=0) as contexts,
        spread.runner() as runner,
        progress_bar("residues") as progress,
        interrupts.resume_by_command(lambda: contexts.info()["contexts"] > 0),
    ):
        used = announce(turbo, [context_arm(turbo)], spread.devices)
        computed = store_sequences(
            turbo,
            contexts,
            [record.sequence for record in good],
            toks_per_batch=toks_per_batch,
            progress=progress,
            on_failure=failed.__setitem__,
            runner=runner,
            plan=sharding.plan,
        )
        held = contexts.info()
    bad += [BadRecord(record.id, failed[record.sequence]) for record in good if record.sequence in failed]
    sharding.finish(used, bad)
    list_bad(proteins, bad)
    ids = [context_key(turbo, text) for text in drawn.texts]
    result = {
        "run": used.to_dict() | drawn.to_dict(),
        "out": os.fspath(folder),
        "computed": computed,
        "contexts": held["contexts"],
        "bytes": held["bytes"],
        "failed": failures(bad),
    } | ({"ids": ids} if ids else {})
    size = bytes_text(held["bytes"])
    text = f"{counted(computed, 'context')} computed; {sharding.out} holds {held['contexts']:,}, {size}"
    show("\n".join([text, *ids]), to_json=json, result=result)
    return sharding.exit_code(bad)
