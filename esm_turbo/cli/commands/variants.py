"""`esm-turbo variants`."""

from __future__ import annotations

from dataclasses import asdict

from esm_turbo.cli.homologs import DrawnHomologs, HomologOptions
from esm_turbo.cli.inputs import (
    announce,
    check_usable,
    named_arms,
    read_proteins,
    readable,
    resumable,
)
from esm_turbo.cli.options import (
    Arms,
    AutoBatchTokens,
    BackendOption,
    CacheOptions,
    InputFile,
    JsonFile,
    OptionalInput,
    ParallelOptions,
    PictureFile,
    SequenceOptions,
    StoreFolder,
    TableFile,
)
from esm_turbo.cli.parallel import Spread
from esm_turbo.cli.pictures import check_plot
from esm_turbo.cli.score_report import variants_report
from esm_turbo.cli.scoring import check_options, conclude, running, write_results
from esm_turbo.cli.sharding import Sharding, model_settings
from esm_turbo.config import DEFAULT_REFRESH, Backend
from esm_turbo.proteins.fasta import BadRecord
from esm_turbo.tasks.common.options import VariantMethod


def variants(
    wild_types: InputFile,
    variants: OptionalInput = None,
    /,
    *,
    method: VariantMethod = "masked",
    arm: Arms = None,
    refresh: int = DEFAULT_REFRESH,
    first_position: int | None = None,
    mutant_column: str | None = None,
    protein_column: str | None = None,
    measured: str | None = None,
    top: int | None = None,
    toks_per_batch: AutoBatchTokens = None,
    out: TableFile = None,
    json: JsonFile = None,
    plot: PictureFile = None,
    homologs: HomologOptions = HomologOptions(),
    letters: SequenceOptions = SequenceOptions(),
    store: StoreFolder = None,
    model: CacheOptions = CacheOptions(),
    backend: BackendOption = Backend.AUTO,
    parallel: ParallelOptions = ParallelOptions(),
) -> int:
    """Score variants of proteins by the model's predictions, and compare the scores with measurements.

    Bad records and variants are reported at the end; all others are scored. A run that was stopped continues where it
    was, if it has an --out: run the same command again.

    Args:
        wild_types: FASTA file of one protein or several, plain or gzip.
        variants: CSV or TSV file with a column mutant (H24C, H24C:E26K or p.His24Cys) and, for several wild types, a
            column protein with their identifiers. By default, all single substitutions.
        method: masked masks each position in turn; wild_type masks none, which is cheaper and less accurate;
            pseudo_perplexity masks every residue of every variant but B, X and Z in turn, which is slower and scores
            insertions and deletions, too (K2_G4del, p.Lys2_Gly3insGlnSer).
        arm: How the protein is computed: full recomputes it for every position, frozen stores it at full precision,
            turbo compressed. By default turbo, or frozen if the model has no calibration.
        refresh: Number of residues around each masked position to recompute.
        first_position: Number of each protein's first residue. By default, that of its header (first_position=24, or
            an identifier such as NAME/24-286), or 1.
        mutant_column: Column of variants, as in --mutant-column Name for a table of ClinVar, whose names end in
            (p.Arg175His). By default, mutant.
        protein_column: Column of identifiers, accessions or sequences of wild types. By default, protein.
        measured: Column to compare with, higher is better. By default, fitness or DMS_score.
        top: Number of top-scoring variants to print per protein. By default, 10 for up to 3 proteins; of more, only a
            summary is printed.
        out: CSV, TSV or Parquet file, by its suffix, to write all scores to, with all other columns of the variants.
    """
    check_options(arm, refresh, top, toks_per_batch)
    spread = Spread.of(parallel, model, backend=backend)
    sharding = Sharding("variants", "table", parallel.shard, out, [wild_types, variants, homologs.homologs])
    for name, column in (("measured", measured), ("protein-column", protein_column), ("mutant-column", mutant_column)):
        if column is not None and variants is None:
            raise ValueError(f"--{name} {column} names a column; give the table of variants that has it")
    records, bad_records = read_proteins(wild_types, letters)
    drawn = DrawnHomologs.of(homologs, records, letters.unknown)
    from esm_turbo.tasks.common.homologs import default_query_arm
    from esm_turbo.tasks.variants.records import read_variants, score_records

    good, bad = None, list[BadRecord]()
    if variants is not None:
        good, bad = read_variants(
            variants,
            records,
            first_position=first_position,
            protein_column=protein_column,
            measured=measured,
            mutant_column=mutant_column or "mutant",
            indels=method == "pseudo_perplexity",
        )
        check_usable(variants, good, bad, "variant")
    check_plot(plot, len(records))
    turbo = spread.load()
    drawn.check_model(turbo)
    records = readable(turbo, wild_types, records, bad_records)
    if good is not None:
        usable = {record.id for record in records}
        good = [one for one in good if one.protein in usable]
    arms = named_arms(arm, turbo, None if drawn.contexts else default_query_arm(turbo))
    settings = {"method": method, "refresh": refresh, "toks_per_batch": toks_per_batch} | drawn.to_dict()
    more = {"first_position": first_position, "protein_column": protein_column, "mutant_column": mutant_column}
    if sharding.is_done(lambda: model_settings(turbo, arms) | settings | more | asdict(letters)):
        return 0
    used = announce(turbo, arms, spread.devices)
    with resumable(sharding.out) as journal:
        with running(spread, turbo, store, journal, "positions") as where:
            run = score_records(
                turbo,
                records,
                good,
                arms,
                method=method,
                refresh=refresh,
                toks_per_batch=toks_per_batch,
                first_position=first_position,
                contexts=drawn.texts,
                freeze_query=drawn.freeze_query,
                plan=sharding.plan,
                **where,
            )
        write_results(run, used, settings, sharding, records)
    return conclude(
        run,
        used,
        sharding,
        [(wild_types, bad_records), (variants, bad)],
        variants_report(run, top),
        "variant",
        plot=plot,
        json=json,
        more=drawn.to_dict(),
    )
