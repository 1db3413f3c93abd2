"""`esm-turbo variants`."""

from __future__ import annotations

from esm_turbo.cli.console import progress_bar, save, show
from esm_turbo.cli.inputs import check_minimum, check_usable, list_bad, load_model
from esm_turbo.cli.options import (
    Arms,
    AutoBatchTokens,
    BackendOption,
    CacheOptions,
    InputFile,
    JsonFile,
    OptionalInput,
    TextFile,
    Unknown,
)
from esm_turbo.cli.report import failures
from esm_turbo.cli.score_report import variants_report
from esm_turbo.config import DEFAULT_REFRESH, Backend
from esm_turbo.proteins.fasta import BadRecord, read_fasta_strict
from esm_turbo.tasks.common.options import MarginalMethod


def variants(
    wild_type: InputFile,
    variants: OptionalInput = None,
    /,
    *,
    method: MarginalMethod = "masked",
    arm: Arms = ("turbo",),
    refresh: int = DEFAULT_REFRESH,
    first_position: int = 1,
    measured: str | None = None,
    top: int = 10,
    toks_per_batch: AutoBatchTokens = None,
    unknown: Unknown = None,
    out: TextFile = None,
    json: JsonFile = None,
    model: CacheOptions = CacheOptions(),
    backend: BackendOption = Backend.AUTO,
) -> int:
    """Score substitutions of residues by the model's predictions, and compare the scores with measurements.

    Bad variants are reported at the end; all others are scored.

    Args:
        wild_type: FASTA file with one protein, plain or gzip.
        variants: CSV file with a column mutant (H24C, or H24C:E26K). By default, all single substitutions.
        method: masked masks each position in turn; wild_type masks none, which is cheaper and less accurate.
        arm: How the protein is computed: full recomputes it for every position, frozen stores it at full precision,
            turbo compressed.
        refresh: Number of residues around each masked position to recompute.
        first_position: Number of the protein's first residue.
        measured: Column of the CSV file to compare with, higher is better. By default, fitness.
        top: Number of top-scoring variants to print.
        out: CSV file to write all scores to.
    """
    check_minimum(0, refresh=refresh, top=top)
    check_minimum(1, toks_per_batch=toks_per_batch)
    if not arm:
        raise ValueError("--arm must name at least one arm")
    if measured is not None and variants is None:
        raise ValueError(f"--measured {measured} names a column; give the CSV file of variants that has it")
    records = read_fasta_strict(wild_type, unknown=unknown)
    if len(records) != 1:
        raise ValueError(f"{wild_type}: holds {len(records)} proteins; give a file with the wild type alone")
    from esm_turbo.tasks.variants.records import read_variants, score_file

    good, bad = None, list[BadRecord]()
    if variants is not None:
        good, bad = read_variants(variants, records[0], first_position=first_position, measured=measured)
        check_usable(variants, good, bad, "variant")
    turbo = load_model(model, backend=backend)
    arms = tuple(dict.fromkeys(arm))
    with progress_bar("positions") as progress:
        run = score_file(
            turbo,
            records[0],
            good,
            arms,
            first_position=first_position,
            progress=progress,
            refresh=refresh,
            method=method,
            toks_per_batch=toks_per_batch,
        )
    if out is not None:
        save(run.write, out)
    if variants is not None:
        list_bad(variants, bad)
    result = run.to_dict() | {"failed": failures(bad)}
    show(*variants_report(run, top), to_json=json, result=result)
    return 1 if bad else 0
