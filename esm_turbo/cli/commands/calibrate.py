"""`esm-turbo calibrate`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from esm_turbo.assets import calibration_families, calibration_proteins, named_proteins
from esm_turbo.cli.console import progress_bar, replacement_said, show, working
from esm_turbo.cli.inputs import announce
from esm_turbo.cli.options import (
    InputFile,
    JsonFile,
    ModelOptions,
    PictureFile,
    ProteinBatchTokens,
    SequenceOptions,
    UnshardedOptions,
    Writes,
)
from esm_turbo.cli.parallel import Spread
from esm_turbo.cli.pictures import check_plot, save_plot
from esm_turbo.files.paths import is_device
from esm_turbo.files.suffixes import TENSORS
from esm_turbo.proteins.fasta import read_fasta_strict, sha256_file


def calibrate(
    proteins: InputFile,
    /,
    *,
    out: Annotated[Path, Writes("calibration", TENSORS)],
    max_residues: int | None = None,
    toks_per_batch: ProteinBatchTokens = None,
    json: JsonFile = None,
    plot: PictureFile = None,
    letters: SequenceOptions = SequenceOptions(),
    model: ModelOptions = ModelOptions(),
    parallel: UnshardedOptions = UnshardedOptions(),
) -> None:
    """Calibrate a model on proteins, so that it can write compressed caches.

    It ends by measuring what it made, on proteins outside of the calibration: every tenth of the file, which it holds
    out, and proteins shipped with the program; `esm-turbo info` shows the figures again. A file with any bad record is
    refused. Headers may state a class for the summary, as in `>ID class=mainly_alpha`; for E1 they name the family of
    homologs, as in `>ID family=1`. With `--precision fp8` it also measures eight-bit products, on any device, and
    records which of them a model of that precision leaves in bfloat16.

    Args:
        proteins: FASTA file, plain or gzip; shipped for the proteins that are shipped with the program.
        out: Calibration to write, a safetensors file.
        max_residues: Use only the first proteins, up to this total number of residues.
    """
    proteins = named_proteins(proteins, calibration_proteins)
    if is_device(proteins):
        raise ValueError("a calibration records the checksum of its proteins; give a file, not standard input")
    read, shipped = sha256_file(proteins) if proteins.is_file() else "", proteins == calibration_proteins()
    records = read_fasta_strict(proteins, **asdict(letters))
    check_plot(plot)
    if parallel.shard is not None:
        raise ValueError("a calibration is one file, which shards cannot share: leave --shard out, or give --workers")
    precision, model = model.precision, replace(model, precision=None)
    if precision is not None:
        model = replace(model, dtype=model.dtype or "bfloat16")
    spread = Spread.of(parallel, model)
    turbo = spread.load()
    announce(turbo, devices=spread.devices)
    from esm_turbo.cli.report import calibration_report
    from esm_turbo.evaluate.calibrated import beside_shipped, measure_calibration
    from esm_turbo.model.precision import all_products
    from esm_turbo.proteins.homologs import join_families
    from esm_turbo.tasks.calibration.records import calibrate_records, first_records, hold_out

    if precision is not None:
        all_products(turbo.model)
    has_families = turbo.model.base_model.exact_contexts is not None
    if has_families:
        proteins = calibration_families() if shipped else proteins
        records = join_families(read_fasta_strict(proteins) if shipped else records)
    records = first_records(records, max_residues)
    # Shipped proteins for measuring are not among those for calibrating.
    records, held_out = (records, []) if shipped else hold_out(records)
    if not shipped and sha256_file(proteins) != read:
        raise ValueError(f"{proteins}: has changed since it was read; run it again")
    with progress_bar("residues", {"calibrate": None, "measure": None}) as progress:
        with spread.runner() as runner:
            calibration = calibrate_records(
                turbo, records, source=proteins, toks_per_batch=toks_per_batch, progress=progress, runner=runner
            )
        spread.move(turbo)
        calibration.quality = quality = measure_calibration(
            turbo, calibration, records, beside_shipped(held_out, has_families), progress, precision
        )
    with replacement_said(out), working("writing"):
        calibration.save(out)
    result = {
        "out": os.fspath(out),
        "provenance": calibration.provenance,
        "quality": None if quality is None else quality.to_dict(),
        "bytes": os.path.getsize(out),
    }
    show(*calibration_report(result, calibration.geometry), to_json=json, result=result)
    save_plot(plot, calibration)
