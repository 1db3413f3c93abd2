"""`esm-turbo binders`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from esm_turbo.cli.console import progress_bar, save, save_text, show
from esm_turbo.cli.inputs import (
    announce,
    background_setting,
    check_minimum,
    list_bad,
    load_model,
    named_arms,
    opened_store,
    outcome,
    read_background,
    read_proteins,
    readable,
)
from esm_turbo.cli.options import (
    NO_DEFAULT,
    READS,
    AutoBatchTokens,
    CacheOptions,
    InputFile,
    JsonFile,
    PictureFile,
    SequenceOptions,
    StoreFolder,
    TableOrSequenceFile,
)
from esm_turbo.cli.pictures import check_plot, save_plot
from esm_turbo.cli.report import failures
from esm_turbo.cli.score_report import binders_report
from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.files.suffixes import SEQUENCES
from esm_turbo.files.tables import write_table
from esm_turbo.proteins.fasta import BadRecord
from esm_turbo.tasks.common.options import Arm, SortBy
from esm_turbo.tasks.common.progress import part_of


def binders(
    targets: InputFile,
    /,
    *,
    length: int | None = None,
    template: str | None = None,
    num_return_sequences: int = 10,
    top_k: int = 3,
    top_p: float = 1.0,
    temperature: float = 1.0,
    per_step: int | None = None,
    sweeps: int = 1,
    allowed: Annotated[str | None, NO_DEFAULT] = None,
    banned: Annotated[str, NO_DEFAULT] = "",
    seed: int = 0,
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    background: Annotated[str, READS] = "none",
    sort_by: SortBy = "likelihood",
    rescore: int | None = None,
    top: int = 10,
    toks_per_batch: AutoBatchTokens = None,
    out: TableOrSequenceFile = None,
    json: JsonFile = None,
    plot: PictureFile = None,
    letters: SequenceOptions = SequenceOptions(),
    store: StoreFolder = None,
    model: CacheOptions = CacheOptions(),
) -> int:
    """Generate peptides for targets by the recipe of PepMLM, and rank them as score does.

    A mask per residue follows the target, each residue is drawn from the most likely ones, and the peptides are ranked
    by pseudo-perplexity, or by specificity. It takes a model that was trained for this, such as PepMLM. Bad records are
    reported at the end; all others are used.

    Args:
        targets: FASTA file, plain or gzip.
        length: Residues per peptide; not needed with --template.
        template: Residues that peptides keep, such as GXXP, where X is any; brackets around letters allow one of these,
            braces any but these. Kept residues are seen while the others are drawn.
        num_return_sequences: Peptides to draw per target; equal ones are listed once.
        top_k: Sample from the k most likely residues only.
        top_p: Sample from the most likely residues only, those whose probabilities add up to p.
        temperature: Divides the logits; 0 takes the most likely residue.
        per_step: Residues of a peptide to sample per step. By default all at once, as PepMLM does.
        sweeps: How many times each residue is sampled; from the second time on, given all others (Gibbs sampling).
        allowed: Residues that may be generated, such as ACDE.
        banned: Residues that are never generated.
        seed: Seed of the samples of every target.
        arm: How the target is computed for the scores: full, frozen or turbo. By default turbo, or frozen if the model
            has no calibration.
        refresh: Residues at the end of the target that are recomputed with every peptide.
        background: Compare each peptide with itself elsewhere, for its specificity: on the other targets (targets),
            after no target (alone), on the twelve shipped proteins (decoys or all-decoys), or on those of a FASTA file.
        sort_by: Rank by likelihood, or by specificity, which needs a background.
        rescore: Number of peptides per target, the best, that are scored again exactly, by the arm full; where
            specificity ranks, in each protein of their background, too.
        top: Number of peptides to print per target.
        out: CSV, TSV or Parquet file, by its suffix, to write all peptides to; or FASTA file, of their ranks and the
            number that ranks.
    """
    check_minimum(0, refresh=refresh, top=top)
    check_minimum(1, length=length, num_return_sequences=num_return_sequences, top_k=top_k)
    check_minimum(1, per_step=per_step, sweeps=sweeps, rescore=rescore, toks_per_batch=toks_per_batch)
    if (length is None) == (template is None):
        raise ValueError("give --length, or --template, which has one" + (", not both" if length is not None else ""))
    good, bad = read_proteins(targets, letters)
    compared, decoys, bad_decoys = read_background(background, letters, targets=1)

    def check_targets() -> None:
        if compared == "targets" and len({record.sequence for record in good}) < 2:
            raise ValueError(f"--background targets needs several targets, {targets} has one sequence; give decoys")

    check_targets()
    from esm_turbo.tasks.scoring.pairs import check_ranking

    check_ranking(arm, rescore or 0, sort_by, background)
    check_plot(plot, len(good))
    turbo = load_model(model)
    good = readable(turbo, targets, good, bad)
    check_targets()
    from esm_turbo.model.memory import is_out_of_memory
    from esm_turbo.tasks.common.memory import too_large
    from esm_turbo.tasks.common.run_info import RUN_COLUMNS, run_metadata
    from esm_turbo.tasks.scoring.records import BACKGROUND_COLUMN, COLUMN_TYPES

    [arm] = named_arms(None if arm is None else (arm,), turbo)
    used = announce(turbo, [arm])
    found = {}
    with opened_store(store, turbo) as contexts, progress_bar("residues") as progress:
        for number, record in enumerate(good, start=1):
            others = [one.sequence for one in decoys]
            if compared == "targets":
                others = [one.sequence for one in good if one.sequence != record.sequence]
            try:
                made = turbo.generate_binders(
                    record.sequence,
                    length,
                    template=template,
                    num_return_sequences=num_return_sequences,
                    top_k=top_k,
                    top_p=top_p,
                    temperature=temperature,
                    per_step=per_step,
                    sweeps=sweeps,
                    allowed=allowed,
                    banned=banned,
                    seed=seed,
                    arm=arm,
                    refresh=refresh,
                    background=others or ("none" if compared is None else "alone"),
                    rescore=rescore or 0,
                    sort_by=sort_by,
                    toks_per_batch=toks_per_batch,
                    store=contexts,
                    progress=part_of(progress, name=f"target {number} of {len(good)}, " if len(good) > 1 else ""),
                )
                # Other targets, and no target, were given by their residues, as decoys are.
                found[record.id] = replace(made, scores=replace(made.scores, background=compared))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                bad.append(BadRecord(record.id, too_large(len(record.sequence), turbo.model.device, error)))
    parts = binders_report(found, top)
    compared_with = {"background": background_setting(background, decoys)}
    if out is not None and found and out.suffix.lower() in SEQUENCES:
        save_text(out, "".join(one.fasta(name) for name, one in found.items()))
    elif out is not None and found:
        columns = ["target", *next(iter(found.values())).columns(), BACKGROUND_COLUMN, *RUN_COLUMNS]
        rows_of_all = [
            [name, *row, against, *used.cells()]
            for name, one in found.items()
            for against in [one.scores.compared_with]
            for row in one.rows()
        ]
        types = {**COLUMN_TYPES, "mean_log_prob": float, "seed": int}
        settings = {"length": length, "template": template, "seed": seed, "refresh": refresh}
        metadata = run_metadata(used, settings | compared_with | {"sort_by": sort_by})
        save(lambda path: write_table(path, columns, rows_of_all, types, metadata), out)
    list_bad(targets, bad)
    list_bad(Path(background), bad_decoys)
    bad += bad_decoys
    results = [{"target": name, **one.to_dict()} for name, one in found.items()]
    written = sum(len(one.binders) for one in found.values())
    parts += outcome(written, "peptide", out, bad)
    show(
        *parts,
        to_json=json,
        result={"run": used.to_dict() | compared_with, "results": results, "failed": failures(bad)},
    )
    save_plot(plot, found, used)
    return 1 if bad else 0
