"""`esm-turbo score`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from esm_turbo.cli.console import progress_bar, save, show
from esm_turbo.cli.inputs import (
    announce,
    check_minimum,
    check_usable,
    list_bad,
    named_arms,
    opened_store,
    outcome,
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
from esm_turbo.cli.pictures import check_plot, save_plot
from esm_turbo.cli.report import failures
from esm_turbo.cli.score_report import score_report
from esm_turbo.cli.sharding import Sharding, model_settings
from esm_turbo.config import DEFAULT_REFRESH, Backend
from esm_turbo.proteins.fasta import BadRecord
from esm_turbo.tasks.common.options import DEFAULT_TOP_K, CandidateFill


def score(
    targets: InputFile,
    candidates: OptionalInput = None,
    /,
    *,
    arm: Arms = None,
    refresh: int = DEFAULT_REFRESH,
    place: CandidateFill = "masked",
    top: int | None = None,
    top_k: int = DEFAULT_TOP_K,
    toks_per_batch: AutoBatchTokens = None,
    out: TableFile = None,
    json: JsonFile = None,
    plot: PictureFile = None,
    letters: SequenceOptions = SequenceOptions(),
    store: StoreFolder = None,
    model: CacheOptions = CacheOptions(),
    backend: BackendOption = Backend.AUTO,
    parallel: ParallelOptions = ParallelOptions(),
) -> int:
    """Score candidates, such as peptides, as continuations of targets by pseudo-perplexity.

    Every residue of a candidate is masked in turn. A target is computed once for all candidates of the same length.
    With several arms, the agreement of their rankings is shown. Bad records are reported at the end; all others are
    scored. A run that was stopped continues where it was, if it has an --out: run the same command again.

    Args:
        targets: FASTA file, plain or gzip; or alone, PepMLM's table of pairs, with the columns Receptor Sequence (or
            Input Sequence) and Binder (or Sequence).
        candidates: FASTA file, or CSV or TSV file with a column sequence (or binder) and optional columns id and target
            (identifier, accession or sequence; a candidate with a target is scored on that one only).
        arm: How targets are computed: full recomputes them for every mask, frozen stores them at full precision, turbo
            compressed. By default turbo, or frozen if the model has no calibration.
        refresh: Residues at the end of the target that are recomputed with every candidate.
        place: What fills the candidate's positions while the target is computed: masks, or nothing.
        top: Number of candidates to print per target. By default, 10 for up to 3 targets; of more, only a summary is
            printed.
        top_k: Number of top candidates used to compare arms.
        out: CSV, TSV or Parquet file, by its suffix, to write all scores to, with all other columns of the candidates.
    """
    check_minimum(0, refresh=refresh, top=top)
    check_minimum(1, top_k=top_k, toks_per_batch=toks_per_batch)
    if arm == ():
        raise ValueError("--arm must name at least one arm")
    spread = Spread.of(parallel, model, backend=backend)
    sharding = Sharding("score", "table", parallel.shard, out, [targets, candidates])
    from esm_turbo.tasks.scoring.records import read_candidates, read_pairs, score_records

    if candidates is None:
        good, read, bad_candidates = read_pairs(targets, unknown=letters.unknown, remove_gaps=letters.remove_gaps)
        candidates, bad_targets = targets, list[BadRecord]()
    else:
        good, bad_targets = read_proteins(targets, letters)
        read, bad_candidates = read_candidates(candidates, good, **asdict(letters))
    check_usable(candidates, read, bad_candidates)
    check_plot(plot, len(good))
    turbo = spread.load()
    good = readable(turbo, targets, good, bad_targets)
    arms = named_arms(arm, turbo)
    settings = {"refresh": refresh, "place": place, "toks_per_batch": toks_per_batch}
    if sharding.is_done(lambda: model_settings(turbo, arms) | settings | asdict(letters)):
        return 0
    used = announce(turbo, arms, spread.devices)
    with resumable(sharding.out) as journal:
        opened = opened_store(store, turbo, alone=spread.devices is None)
        with opened as contexts, spread.runner() as runner, progress_bar("residues") as progress:
            run = score_records(
                turbo,
                good,
                read,
                arms,
                top_k=top_k,
                journal=journal,
                progress=progress,
                refresh=refresh,
                place=place,
                toks_per_batch=toks_per_batch,
                store=contexts,
                runner=runner,
                plan=sharding.plan,
            )
        if sharding.out is not None and run.results:
            save(partial(run.write, run=used, settings=settings), sharding.out)
    sharding.finish(used, [*bad_targets, *bad_candidates, *run.failed], *run.places(good))
    if plot is not None:
        from esm_turbo.pictures.sheets import sheets_of

        save_plot(plot, sheets_of(run, used))
    list_bad(targets, [*bad_targets, *run.failed])
    list_bad(candidates, bad_candidates)
    failed = [*bad_targets, *bad_candidates, *run.failed]
    result = {"run": used.to_dict(), "results": [one.to_dict() for one in run.results], "failed": failures(failed)}
    rows = sum(len(one.candidates) * len(one.scores) for one in run.results)
    show(*score_report(run, top), *outcome(rows, "score", sharding.out, failed), to_json=json, result=result)
    return sharding.exit_code(failed)
