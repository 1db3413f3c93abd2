"""`esm-turbo score`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from esm_turbo.cli.console import save, say
from esm_turbo.cli.inputs import (
    announce,
    background_setting,
    check_usable,
    named_arms,
    read_background,
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
    ScreenOptions,
    SequenceOptions,
    StoreFolder,
    TableFile,
)
from esm_turbo.cli.parallel import Spread
from esm_turbo.cli.pictures import check_plot
from esm_turbo.cli.score_report import score_report
from esm_turbo.cli.scoring import check_options, conclude, running, write_results
from esm_turbo.cli.sharding import Sharding, model_settings
from esm_turbo.config import DEFAULT_REFRESH, Backend
from esm_turbo.files.tabular import counted
from esm_turbo.proteins.fasta import UNKNOWN, BadRecord
from esm_turbo.tasks.common.options import DEFAULT_TOP_K, Background, CandidateFill, UnknownResidues

if TYPE_CHECKING:
    from esm_turbo.tasks.scoring.records import Candidate


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
    matrix: TableFile = None,
    json: JsonFile = None,
    plot: PictureFile = None,
    screen: ScreenOptions = ScreenOptions(),
    letters: SequenceOptions = SequenceOptions(),
    store: StoreFolder = None,
    model: CacheOptions = CacheOptions(),
    backend: BackendOption = Backend.AUTO,
    parallel: ParallelOptions = ParallelOptions(),
) -> int:
    """Score candidates, such as peptides, as continuations of targets by pseudo-perplexity.

    Every residue of a candidate is masked in turn. A target is computed once for all candidates of the same length.
    With several arms, the agreement of their likelihoods is shown. Bad records are reported at the end; all others are
    scored. A run that was stopped continues where it was, if it has an --out: run the same command again.

    Args:
        targets: FASTA file, plain or gzip; or alone, a table of pairs, with the columns target (or as in PepMLM,
            Receptor Sequence or Input Sequence), which holds residues, and binder (or sequence).
        candidates: FASTA file, .txt file of one sequence per line, or CSV or TSV file with a column sequence (or
            binder) and optional columns id and target (identifier, accession or sequence; a candidate with a target is
            scored on that one only).
        arm: How targets are computed: full recomputes them for every mask, frozen stores them at full precision, turbo
            compressed. By default turbo, or frozen if the model has no calibration.
        refresh: Residues at the end of the target that are recomputed with every candidate.
        place: What fills the candidate's positions while the target is computed: masks, or nothing.
        top: Number of candidates to print per target. By default, 10 for up to 3 targets; of more, only a summary is
            printed.
        top_k: Number of top candidates used to compare arms.
        out: CSV, TSV or Parquet file, by its suffix, to write all scores to, with all other columns of the candidates.
        matrix: CSV, TSV or Parquet file to write a row per target and a column per candidate to, of the number
            that ranks, which the column number names with its unit.
    """
    check_options(arm, refresh, top, toks_per_batch, top_k=top_k, rescore=screen.rescore)
    if screen.rescore is not None and (parallel.shard is not None or "full" in (arm or ())):
        reason = "--arm full scores all" if parallel.shard is None else "a shard has only some of each ranking"
        raise ValueError(f"--rescore scores the best again by the arm full, but {reason}; give one of the two")
    if matrix is not None and parallel.shard is not None:
        raise ValueError("--matrix cannot be merged from shards; leave --shard out")
    spread = Spread.of(parallel, model, backend=backend)
    decoys = None if screen.background in get_args(Background) else screen.background
    sharding = Sharding("score", "table", parallel.shard, out, [targets, candidates, decoys])
    from esm_turbo.pictures.ranking import has_matrix
    from esm_turbo.tasks.common.run_info import run_metadata
    from esm_turbo.tasks.scoring.records import read_candidates, read_pairs, score_records
    from esm_turbo.tasks.scoring.screens import ScoreMore, compare, rescore, score_in, shared_candidates

    if candidates is None:
        good, read, bad_candidates = read_pairs(targets, unknown=letters.unknown, remove_gaps=letters.remove_gaps)
        candidates, bad_targets = targets, list[BadRecord]()
    else:
        good, bad_targets = read_proteins(targets, letters)
        # Names of targets that are not read need not exist.
        named = good if screen.pairs == "column" else None
        read, bad_candidates = read_candidates(candidates, named, **asdict(letters))
    if screen.pairs == "all":
        # A candidate of several rows is the same on all targets.
        once = {(one.name, one.sequence): replace(one, target=None) for one in reversed(read)}
        if len(once) < len(read):
            say(f"of {counted(len(read), 'row')}, {len(read) - len(once):,} repeat a candidate: its first row stands")
        read = list(once.values())[::-1]
    check_usable(candidates, read, bad_candidates)
    _mention_unknown(read, screen.unknown_residues)
    distinct = {(one.sequence, one.target) for one in read}
    pairs = sum(len(good) if target is None else 1 for _, target in distinct)
    per_candidate = pairs // len({one.sequence for one in read})
    background, contexts, bad_decoys = read_background(screen.background, letters, per_candidate)
    if contexts:
        times = 1 + len(contexts) / per_candidate
        others = f"on {counted(len(contexts), 'other protein')}" if background == "decoys" else "without a target"
        say(f"each candidate is also scored {others}, for its specificity: {times:.3g} times the work")
    compares = background is not None and (bool(contexts) or shared_candidates(good, read))
    if screen.sort_by == "specificity" and not compares:
        each = any(one.target is not None for one in read) and len(good) > 1
        raise ValueError(
            "--sort-by specificity: no candidate has several targets, so that none is compared with anything; give"
            + " --pairs all, or" * each
            + " --background alone, decoys or a FASTA file"
        )
    check_plot(plot, len(good), summary=has_matrix(len(good), len({one.sequence for one in read})))
    turbo = spread.load()
    good = readable(turbo, targets, good, bad_targets)
    arms = named_arms(arm, turbo)
    settings: dict[str, Any] = {
        "refresh": refresh,
        "place": place,
        "toks_per_batch": toks_per_batch,
        "unknown_residues": screen.unknown_residues,
    }
    chosen = {
        "background": background_setting(screen.background, contexts),
        "sort_by": screen.sort_by,
        "pairs": screen.pairs,
    }
    if sharding.is_done(lambda: model_settings(turbo, arms) | settings | chosen | asdict(letters)):
        return 0
    used = announce(turbo, arms, spread.devices)
    with resumable(sharding.out) as journal:
        stages: dict[str, int | None] = {"score": None}
        if contexts:
            shards = 1 if sharding.plan is None else sharding.plan.shard.of
            residues = sum(map(len, {one.sequence for one in read}))
            stages["background"] = len(arms) * len(contexts) * residues // shards
        if screen.rescore is not None:
            stages["rescore"] = None
            if contexts and screen.sort_by == "specificity":
                stages["rescore background"] = None
        with running(spread, turbo, store, journal, "residues", stages) as where:
            score_all: ScoreMore = partial(
                score_records, turbo, top_k=top_k, sort_by=screen.sort_by, **settings, **where
            )
            run = score_all(good, read, arms, plan=sharding.plan)
            if background is not None and contexts:
                compare(run, background, score_in(contexts, run, score_all))
            elif background is not None and compares and sharding.plan is None:
                compare(run, background)
            if screen.rescore is not None:
                rescore(run, screen.rescore, contexts, score_all)
        write_results(run, used, settings | chosen, sharding, good, compares_targets=compares and not contexts)
    if matrix is not None and run.results:
        save(partial(run.matrix().write, metadata=run_metadata(used, settings | chosen)), matrix)
        say(f"matrix written to {matrix}")
    bad = [(targets, bad_targets), (candidates, bad_candidates), (Path(screen.background), bad_decoys)]
    more = {"background": chosen["background"]}
    return conclude(run, used, sharding, bad, score_report(run, top), "score", plot=plot, json=json, more=more)


def _mention_unknown(candidates: Sequence[Candidate], unknown_residues: UnknownResidues) -> None:
    """Say how many candidates hold residues that stand for several."""
    count = sum(not set(UNKNOWN).isdisjoint(one.sequence) for one in candidates)
    if count:
        what = "are left out of the figures" if unknown_residues == "omit" else "make them unlikely"
        verb = "holds" if count == 1 else "hold"
        say(f"{count:,} of {counted(len(candidates), 'candidate')} {verb} B, X or Z, which {what} (--unknown-residues)")
