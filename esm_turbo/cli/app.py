"""The command line, `esm-turbo`. What a command needs is imported when it runs, so that `--help` is quick.

Exit codes: 0 done; 1 some records failed or the job failed; 2 wrong arguments or unusable input, nothing written.
Every error is one line on standard error; `--debug` adds the traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from esm_turbo import __version__
from esm_turbo.config import DEFAULT_PRESET, DEFAULT_REFRESH, DEFAULT_TOKS_PER_BATCH, Backend
from esm_turbo.tasks.common.options import Arm, EmbeddingFormat, Include, MarginalMethod, Place, UnmaskingOrder

if TYPE_CHECKING:
    from esm_turbo.proteins.fasta import BadRecord
    from esm_turbo.turbo_esm import TurboEsm

DType = Literal["float32", "bfloat16", "float16"]
# `-` alone is standard output.
JsonFile = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
# `--include mean per_tok`; the generated `--empty-include` says nothing.
_MANY = Parameter(consume_multiple=True, negative="")

app = App(
    name="esm-turbo",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help="A compressed key/value cache for the ESM-2 protein language model.\n\n"
    "`--debug` anywhere adds the traceback to an error. Exit codes: 0 done, 1 some records failed or the job failed,"
    " 2 wrong arguments or unusable input.",
)


class JobError(Exception):
    """The job failed after it had begun; exit code 1."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Args:
        arguments: without the program's name; None for those that the program was called with.
    """
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: without the program's name.
    """
    from esm_turbo.cli.console import quiet

    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        with quiet(debug):
            code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _fail(130, "interrupted", debug)
    except BrokenPipeError:
        # The reader has gone, as in `| head`; a flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CycloptsError as error:
        return _fail(2, f"error: {error}; see esm-turbo --help", debug)
    except (ValueError, ImportError) as error:
        return _fail(2, f"error: {error}", debug)
    except (JobError, OSError) as error:
        return _fail(1, f"error: {error}", debug)
    except Exception as error:
        return _fail(1, f"error: {type(error).__name__}: {error}; --debug shows where", debug)


def _fail(code: int, message: str, debug: bool) -> int:
    from esm_turbo.cli.console import say

    if debug:
        traceback.print_exc()
    say(message)
    return code


@app.command
def demo(*, device: str | None = None, json: JsonFile = None) -> None:
    """The whole job on shipped proteins and the embedded model, without a network, in less than a minute.

    Calibrates on 60 proteins, prefills contexts, extends them, and compares with the exact run.

    Args:
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        json: Write the results as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import progress_bar, quiet_transformers, show, working

    _check_outputs(json)
    with working("loading libraries"):
        quiet_transformers()
        from esm_turbo.cli.demo import run_demo
        from esm_turbo.cli.report import demo_report

    import torch

    # Two threads gain little on so small a model, and on a busy machine they mostly wait for each other.
    torch.set_num_threads(1)
    with progress_bar("done") as progress:
        result = run_demo(device, progress)
    show(*demo_report(result), to_json=json, result=result.to_dict())


@app.command
def calibrate(
    proteins: Path,
    /,
    *,
    out: Path,
    model: str | None = None,
    max_residues: int | None = None,
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    device: str | None = None,
    dtype: DType | None = None,
    unknown: str | None = None,
    json: JsonFile = None,
) -> None:
    """Calibrate a model on proteins: what the compressed caches of this model are made with.

    A file with any bad record is refused. Headers may state a class for the summary, as in `>ID class=mainly_alpha`.

    Args:
        proteins: FASTA file, plain or gzip; calibration_data/proteins.fasta ships with the project.
        out: The calibration to write, a safetensors file.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        max_residues: Use only the first proteins, up to this many residues together.
        toks_per_batch: Padded tokens of a batch; has no influence on the result.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        unknown: X replaces letters that are no residue codes by X instead of refusing them.
        json: Write the summary as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import progress_bar, show, working
    from esm_turbo.proteins.fasta import read_fasta_strict

    _check_outputs(json, proteins, out=out)
    records = read_fasta_strict(proteins, unknown=unknown)
    turbo = _load(model, calibration=False, device=device, dtype=dtype)
    from esm_turbo.cli.report import calibration_report, calibration_result
    from esm_turbo.tasks.calibration.records import calibrate_records

    with progress_bar("residues") as progress:
        calibration = calibrate_records(
            turbo,
            records,
            source=proteins,
            toks_per_batch=toks_per_batch,
            max_residues=max_residues,
            progress=progress,
        )
    with working("writing"):
        calibration.save(out)
    show(*calibration_report(calibration, out), to_json=json, result=calibration_result(calibration, out))


@app.command
def embed(
    proteins: Path,
    out: Path,
    /,
    *,
    model: str | None = None,
    calibration: str | None = None,
    preset: str = DEFAULT_PRESET,
    repr_layers: Annotated[tuple[int, ...], _MANY] = (-1,),
    include: Annotated[tuple[Include, ...], _MANY] = ("mean", "per_tok"),
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    truncation_seq_length: int | None = None,
    window: int | None = None,
    overlap: int | None = None,
    memory: int | None = None,
    format: EmbeddingFormat = "pt",
    device: str | None = None,
    dtype: DType | None = None,
    unknown: str | None = None,
    json: JsonFile = None,
) -> int:
    """Embed proteins; names of options and results as in esm-extract.

    Files are named by a hash of the sequence; index.tsv tells which identifier has which. Bad records are listed at
    the end, the others are done. Given again after an interruption, the same command goes on where it stopped.

    Args:
        proteins: FASTA file, plain or gzip.
        out: Folder for one file a sequence; a file for --format h5.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        calibration: Of the model, for caches and --memory; a file, or auto to calibrate on the shipped proteins.
        preset: What caches, and the memory of windows, are stored as.
        repr_layers: Layers, 0 for the embeddings before the first; negative ones count from the last.
        include: Per-residue states, their mean, those of the cls token (bos), predicted contacts, compressed caches.
        toks_per_batch: Padded tokens of a batch.
        truncation_seq_length: Residues after which a protein is cut; not cut by default.
        window: Longer proteins are computed window by window, of so many residues each; as a whole by default.
        overlap: Residues that windows share; 64 by default.
        memory: Residues before a window that it sees through the compressed cache; as many as --window by default.
        format: Files of torch.save, one file of HDF5, or safetensors.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        unknown: X replaces letters that are no residue codes by X instead of leaving the record out.
        json: Write the summary as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import progress_bar, say, show
    from esm_turbo.proteins.fasta import read_fasta

    _check_outputs(json, proteins)
    if truncation_seq_length is not None and truncation_seq_length < 1:
        raise ValueError(f"--truncation-seq-length must be at least 1, got {truncation_seq_length}")
    if format == "h5" and "cache" in include:
        raise ValueError("caches cannot go into an HDF5 file: take --format safetensors or pt")
    from esm_turbo.tasks.embedding.windows import Windows

    windows = Windows.of(window, overlap, memory)
    good, bad = read_fasta(proteins, unknown=unknown)
    if not good:
        _list_bad(proteins, bad)
        raise ValueError(f"{proteins}: no usable record; correct those above")
    turbo = _load(model, calibration=calibration, preset=preset, device=device, dtype=dtype)
    from esm_turbo.tasks.embedding.embed import EmbeddingRequest
    from esm_turbo.tasks.embedding.records import embed_records

    cut = [record for record in good if truncation_seq_length and len(record.sequence) > truncation_seq_length]
    request = EmbeddingRequest.of(turbo, repr_layers, include, windows)
    with progress_bar("residues") as progress:
        run = embed_records(
            turbo,
            good,
            out,
            request,
            file_format=format,
            toks_per_batch=toks_per_batch,
            truncation_seq_length=truncation_seq_length,
            progress=progress,
        )
    for damaged in run.damaged:
        say(f"warning: {damaged}: was damaged, and is made anew")
    if cut:
        say(f"warning: {len(cut)} protein{'s' if len(cut) > 1 else ''} cut after {truncation_seq_length} residues")
    written, total = len(good) - len(run.failed), len(good) + len(bad)
    bad = [*bad, *run.failed]
    _list_bad(proteins, bad)
    result = {
        "out": os.fspath(out),
        "format": format,
        "written": written,
        "reused": run.reused,
        "damaged": run.damaged,
        "truncated": [record.id for record in cut],
        "failed": [{"record": one.record, "reason": one.reason} for one in bad],
    }
    reused = f" ({run.reused} of them before)" if run.reused else ""
    show(f"{written} of {total} proteins embedded in {out}{reused}", to_json=json, result=result)
    return 1 if bad else 0


@app.command
def generate(
    proteins: Path,
    /,
    *,
    max_new_tokens: int | None = None,
    positions: str | None = None,
    order: UnmaskingOrder | None = None,
    per_step: int = 1,
    sweeps: int = 1,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    allowed: Annotated[tuple[str, ...], _MANY] = (),
    banned: str = "",
    seed: int = 0,
    refresh: int | None = None,
    refresh_every: int | None = None,
    out: Path | None = None,
    model: str | None = None,
    calibration: str | None = None,
    preset: str = DEFAULT_PRESET,
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    device: str | None = None,
    dtype: DType | None = None,
    unknown: str | None = None,
    json: JsonFile = None,
) -> int:
    """Generate residues to the right of proteins (--max-new-tokens), or in place of some of theirs (--positions).

    Writes FASTA whose headers say which positions are new, and how likely the model found them. Bad records are listed
    at the end, the others are done.

    Args:
        proteins: FASTA file, plain or gzip.
        max_new_tokens: Residues to append to each protein.
        positions: Which residues to replace, counted from 1, such as 10-25,40.
        order: In which positions are drawn; random by default.
        per_step: Positions of a protein that are drawn at a step.
        sweeps: How often each position is drawn; from the second on given all others (Gibbs sampling).
        num_return_sequences: Samples of each protein.
        temperature: Divides the logits; 0 takes the likeliest residue.
        top_k: Draw among so many likeliest residues.
        top_p: Draw among the likeliest residues that together have this probability.
        allowed: Residues that may be generated: ACDE, or by position, as in 10=AG 12-15=HP.
        banned: Residues that are never generated.
        seed: The same seed gives the same residues, on the same backend.
        refresh: Residues next to the new ones that are run anew with them; 8 by default.
        refresh_every: Steps from one refresh to the next; by default 1 for --max-new-tokens, 8 for --positions.
        out: FASTA file to write; standard output by default.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        calibration: Of the model; a file, or auto to calibrate on the shipped proteins.
        preset: What contexts are stored as.
        toks_per_batch: Padded tokens of a batch.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        unknown: X replaces letters that are no residue codes by X instead of leaving the record out.
        json: Write the sequences as JSON to this file, - for standard output.
    """
    from dataclasses import asdict

    from esm_turbo.cli.console import progress_bar, show
    from esm_turbo.files.artifacts import replacing
    from esm_turbo.proteins.fasta import read_fasta

    _check_outputs(json, proteins, out=out)
    if (max_new_tokens is None) == (positions is None):
        raise ValueError(
            "give --max-new-tokens to append residues, or --positions to replace some"
            + (", not both" if positions is not None else "")
        )
    good, bad = read_fasta(proteins, unknown=unknown)
    if not good:
        _list_bad(proteins, bad)
        raise ValueError(f"{proteins}: no usable record; correct those above")
    turbo = _load(model, calibration=calibration, preset=preset, device=device, dtype=dtype)
    from esm_turbo.tasks.generation.generate import GenerationOptions
    from esm_turbo.tasks.generation.records import generate_records, parse_allowed, parse_positions

    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        positions=None if positions is None else parse_positions(positions),
        order=order,
        per_step=per_step,
        sweeps=sweeps,
        num_return_sequences=num_return_sequences,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        allowed=parse_allowed(allowed),
        banned=banned,
        refresh=refresh,
        refresh_every=refresh_every,
    )
    with progress_bar("proteins") as progress:
        generated, failed = generate_records(
            turbo, good, options, seed=seed, toks_per_batch=toks_per_batch, progress=progress
        )
    bad = [*bad, *failed]
    _list_bad(proteins, bad)
    if not generated:
        raise ValueError(f"{proteins}: nothing could be generated from any record")
    fasta = "".join(one.fasta() for one in generated)
    if out is not None:
        with replacing(out) as temporary:
            temporary.write_text(fasta, encoding="utf-8")
    result = {
        "out": None if out is None else os.fspath(out),
        "sequences": [asdict(one) for one in generated],
        "failed": [{"record": one.record, "reason": one.reason} for one in bad],
    }
    text = fasta.rstrip("\n") if out is None else f"{len(generated)} sequences written to {out}"
    show(text, to_json=json, result=result)
    return 1 if bad else 0


@app.command
def store(
    proteins: Path,
    folder: Path,
    /,
    *,
    model: str | None = None,
    calibration: str | None = None,
    preset: str = DEFAULT_PRESET,
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    device: str | None = None,
    dtype: DType | None = None,
    unknown: str | None = None,
    json: JsonFile = None,
) -> int:
    """Compute compressed contexts of proteins into a store, those that are not there yet.

    Given again after an interruption, the same command goes on where it stopped. Bad records are listed at the end, the
    others are done.

    Args:
        proteins: FASTA file, plain or gzip.
        folder: Of the store; made if need be.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        calibration: Of the model; a file, or auto to calibrate on the shipped proteins.
        preset: What contexts are stored as.
        toks_per_batch: Padded tokens of a batch.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        unknown: X replaces letters that are no residue codes by X instead of leaving the record out.
        json: Write the summary as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import progress_bar, show
    from esm_turbo.proteins.fasta import read_fasta

    _check_outputs(json, proteins)
    good, bad = read_fasta(proteins, unknown=unknown)
    if not good:
        _list_bad(proteins, bad)
        raise ValueError(f"{proteins}: no usable record; correct those above")
    turbo = _load(model, calibration=calibration, preset=preset, device=device, dtype=dtype)
    from esm_turbo.cli.report import store_report
    from esm_turbo.context_store import ContextStore

    # Nothing is in memory afterwards, so there is no use in keeping it.
    with ContextStore(folder, host_bytes=0, device_bytes=0) as contexts, progress_bar("residues") as progress:
        computed = contexts.add(
            turbo, [record.sequence for record in good], toks_per_batch=toks_per_batch, progress=progress
        )
        held = contexts.info()
    _list_bad(proteins, bad)
    result = {
        "out": os.fspath(folder),
        "computed": computed,
        "contexts": held["contexts"],
        "bytes": held["bytes"],
        "failed": [{"record": one.record, "reason": one.reason} for one in bad],
    }
    show(store_report(result), to_json=json, result=result)
    return 1 if bad else 0


@app.command
def evaluate(
    proteins: Path,
    /,
    *,
    model: str | None = None,
    calibration: str | None = None,
    preset: Annotated[tuple[str, ...], _MANY] = ("exact", DEFAULT_PRESET),
    max_proteins: int | None = None,
    extend_ks: Annotated[tuple[int, ...], _MANY] = (1, 8, 32),
    refresh_ws: Annotated[tuple[int, ...], _MANY] = (0, 8, 32),
    outlier_scales: Annotated[tuple[float, ...], _MANY] = (1, 10, 60, 200),
    outlier_proteins: int = 8,
    outlier_calibration_proteins: int = 60,
    device: str | None = None,
    dtype: DType | None = None,
    backend: Backend = Backend.AUTO,
    unknown: str | None = None,
    json: JsonFile = None,
) -> None:
    """Accuracy and memory of presets, on proteins that the calibration has not seen.

    Compares the whole sequence recomputed, a context at full precision, and a compressed one. A file with any bad
    record is refused. A list without values, as in `--outlier-scales` alone, switches that part off.

    Args:
        proteins: FASTA file, plain or gzip.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        calibration: Of the model; a file, or auto to calibrate on the shipped proteins.
        preset: What to evaluate; all for every preset there is, the codecs to compare with included.
        max_proteins: Only the first so many.
        extend_ks: Numbers of new residues at the end of a context.
        refresh_ws: Numbers of the context's last residues that run again with the new ones.
        outlier_scales: Sizes of outliers planted into keys and values.
        outlier_proteins: The first so many proteins are measured with outliers planted.
        outlier_calibration_proteins: Shipped proteins that each model with outliers is calibrated on.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        backend: What runs the attention over compressed caches.
        unknown: X replaces letters that are no residue codes by X instead of refusing them.
        json: Write the figures as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import progress_bar, show, width
    from esm_turbo.config import TurboConfig
    from esm_turbo.proteins.fasta import read_fasta_strict

    _check_outputs(json, proteins)
    if not preset:
        raise ValueError("--preset must name at least one preset")
    for name in preset:
        if name != "all":
            TurboConfig.from_preset(name)
    if max_proteins is not None and max_proteins < 1:
        raise ValueError(f"--max-proteins must be at least 1, got {max_proteins}")
    records = read_fasta_strict(proteins, unknown=unknown)[:max_proteins]
    turbo = _load(model, calibration=calibration, device=device, dtype=dtype, backend=backend)
    with progress_bar("proteins") as progress:
        result = turbo.evaluate(
            [record.sequence for record in records],
            list(preset),
            names=[record.id for record in records],
            classes=[record.structural_class for record in records],
            extend_ks=extend_ks,
            refresh_ws=refresh_ws,
            outlier_scales=outlier_scales,
            outlier_proteins=outlier_proteins,
            outlier_calibration_proteins=outlier_calibration_proteins,
            progress=progress,
        )
    show(result.table(width()), to_json=json, result=result.to_dict())


@app.command
def score(
    targets: Path,
    candidates: Path,
    /,
    *,
    arm: Annotated[tuple[Arm, ...], _MANY] = ("turbo",),
    refresh: int = DEFAULT_REFRESH,
    place: Place = "masked",
    top: int = 10,
    top_k: int = 10,
    out: Path | None = None,
    model: str | None = None,
    calibration: str | None = None,
    preset: str = DEFAULT_PRESET,
    toks_per_batch: int | None = None,
    device: str | None = None,
    dtype: DType | None = None,
    backend: Backend = Backend.AUTO,
    unknown: str | None = None,
    json: JsonFile = None,
) -> int:
    """Score candidates, such as peptides, as continuations of targets: pseudo-perplexity, every residue masked in turn.

    A target is computed once for all candidates of a length. With several arms, tells how well their rankings agree.
    Bad records are listed at the end, the others are done.

    Args:
        targets: FASTA file, plain or gzip.
        candidates: FASTA file, or CSV with the column sequence and, if wanted, id and target (whose candidate it is).
        arm: How targets take part: full computes them anew for every mask, frozen keeps them at full precision, turbo
            compressed.
        refresh: Last residues of the target that run again with every candidate.
        place: What stands in the candidate's place while the target is computed: masks, or nothing.
        top: Print so many of the best candidates of each target.
        top_k: Compare the arms by so many of the best.
        out: Write all scores to this CSV file.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        calibration: Of the model; a file, or auto to calibrate on the shipped proteins.
        preset: What the arm turbo stores targets as.
        toks_per_batch: Tokens of a batch; chosen by arm and device by default.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        backend: What runs the attention over compressed caches.
        unknown: X replaces letters that are no residue codes by X instead of leaving the record out.
        json: Write the scores as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import progress_bar, show
    from esm_turbo.proteins.fasta import read_fasta

    _check_outputs(json, targets, candidates, out=out)
    _check_counts(refresh=(refresh, 0), top=(top, 0), top_k=(top_k, 1), toks_per_batch=(toks_per_batch, 1))
    if not arm:
        raise ValueError("--arm must name at least one arm")
    good, bad_targets = read_fasta(targets, unknown=unknown)
    from esm_turbo.tasks.scoring.records import read_candidates, score_records

    read, bad_candidates = read_candidates(candidates, good, unknown=unknown)
    for source, kept, refused in ((targets, good, bad_targets), (candidates, read, bad_candidates)):
        if not kept:
            _list_bad(source, refused)
            raise ValueError(f"{source}: no usable record; correct those above")
    turbo = _load(model, calibration=calibration, preset=preset, device=device, dtype=dtype, backend=backend)
    from esm_turbo.cli.score_report import score_report

    arms = tuple(dict.fromkeys(arm))
    options = {"refresh": refresh, "place": place, "toks_per_batch": toks_per_batch}
    with progress_bar("residues") as progress:
        run = score_records(turbo, good, read, arms, top_k=top_k, progress=progress, **options)
    if out is not None and run.results:
        run.write(out)
    _list_bad(targets, [*bad_targets, *run.failed])
    _list_bad(candidates, bad_candidates)
    failed = [*bad_targets, *bad_candidates, *run.failed]
    result = {
        "results": [one.to_dict() for one in run.results],
        "failed": [{"record": one.record, "reason": one.reason} for one in failed],
    }
    show(*score_report(run, top), to_json=json, result=result)
    return 1 if failed else 0


@app.command
def variants(
    wild_type: Path,
    variants: Path | None = None,
    /,
    *,
    method: MarginalMethod = "masked",
    arm: Annotated[tuple[Arm, ...], _MANY] = ("turbo",),
    refresh: int = DEFAULT_REFRESH,
    first_position: int = 1,
    measured: str | None = None,
    top: int = 10,
    out: Path | None = None,
    model: str | None = None,
    calibration: str | None = None,
    preset: str = DEFAULT_PRESET,
    toks_per_batch: int | None = None,
    device: str | None = None,
    dtype: DType | None = None,
    backend: Backend = Backend.AUTO,
    unknown: str | None = None,
    json: JsonFile = None,
) -> int:
    """Score substitutions of residues by what the model would put in their place, and compare with measurements.

    Bad variants are listed at the end, the others are done.

    Args:
        wild_type: FASTA file with one protein, plain or gzip.
        variants: CSV file with the column mutant (H24C, or H24C:E26K); all single substitutions by default.
        method: masked masks every position in turn; wild_type masks nothing, is cheaper and less accurate.
        arm: How the protein takes part: full computes it anew for every position, frozen keeps it at full precision,
            turbo compressed.
        refresh: Residues around a position that run again with its mask.
        first_position: The number of the protein's first residue.
        measured: Column of the CSV file to compare with, the higher the better; fitness by default.
        top: Print so many of the likeliest variants.
        out: Write all scores to this CSV file.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        calibration: Of the model; a file, or auto to calibrate on the shipped proteins.
        preset: What the arm turbo stores the protein as.
        toks_per_batch: Tokens of a batch; chosen by arm and device by default.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        backend: What runs the attention over compressed caches.
        unknown: X replaces letters that are no residue codes by X instead of refusing them.
        json: Write the scores as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import progress_bar, show
    from esm_turbo.proteins.fasta import BadRecord, read_fasta_strict

    _check_outputs(json, wild_type, variants, out=out)
    _check_counts(refresh=(refresh, 0), top=(top, 0), toks_per_batch=(toks_per_batch, 1))
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
        if not good:
            _list_bad(variants, bad)
            raise ValueError(f"{variants}: no usable variant; correct those above")
    turbo = _load(model, calibration=calibration, preset=preset, device=device, dtype=dtype, backend=backend)
    from esm_turbo.cli.score_report import variants_report

    arms = tuple(dict.fromkeys(arm))
    options = {"refresh": refresh, "method": method, "toks_per_batch": toks_per_batch}
    with progress_bar("positions") as progress:
        run = score_file(turbo, records[0], good, arms, first_position=first_position, progress=progress, **options)
    if out is not None:
        run.write(out)
    if variants is not None:
        _list_bad(variants, bad)
    result = run.to_dict() | {"failed": [{"record": one.record, "reason": one.reason} for one in bad]}
    show(*variants_report(run, top), to_json=json, result=result)
    return 1 if bad else 0


@app.command
def info(
    target: str | None = None,
    /,
    *,
    calibration: Path | None = None,
    length: int = 1024,
    batch: int = 1,
    json: JsonFile = None,
) -> None:
    """What a model, calibration, cache, store or folder of embeddings is, and what caches take; the environment if
    nothing is named.

    Args:
        target: Hub id or folder of an ESM-2 checkpoint, or a file, store or folder written by this program.
        calibration: Of the model, to count the bytes of its own caches.
        length: Tokens of each protein, special tokens included, for the bytes of caches.
        batch: Proteins in a cache, likewise.
        json: Write the same as JSON to this file, - for standard output.
    """
    from esm_turbo.cli.console import quiet_transformers, show, working

    _check_outputs(json, target, calibration)
    with working("loading libraries"):
        quiet_transformers()
    from esm_turbo.assets import EMBEDDED_MODEL
    from esm_turbo.cli.info import file_info, model_info
    from esm_turbo.cli.report import info_report
    from esm_turbo.context_store import is_store, store_info
    from esm_turbo.tasks.embedding.files import embeddings_info, is_embeddings

    with _unusable(f"{target} cannot be read"):
        if target is not None and is_store(target):
            result = store_info(target)
        elif target is not None and is_embeddings(target):
            result = embeddings_info(target)
        elif target is not None and Path(target).is_file():
            result = file_info(target, length, batch)
        else:
            result = model_info(EMBEDDED_MODEL if target is None else target, calibration, length, batch)
    if target is None:
        from esm_turbo.env import environment

        result["environment"] = environment()
    show(*info_report(result), to_json=json, result=result)


def _load(model: str | None, *, calibration: str | Literal[False] | None, **options: Any) -> TurboEsm:
    """Loads a model; whatever goes wrong, it is the input that cannot be used."""
    from esm_turbo.cli.console import progress_bar, quiet_transformers, working

    options = {name: value for name, value in options.items() if value is not None}
    with _unusable(f"{model or 'the embedded model'} cannot be loaded"):
        with working("loading the model"):
            quiet_transformers()
            from esm_turbo.turbo_esm import TurboEsm

            turbo = TurboEsm.from_pretrained(
                model, calibration=False if calibration == "auto" else calibration, **options
            )
        if calibration == "auto":
            from esm_turbo.tasks.calibration.auto import auto_calibration

            with progress_bar("residues") as progress:
                made = auto_calibration(turbo, progress)
            own = turbo.model.esm
            own.set_turbo(calibration=made, preset=own.turbo_config, backend=own.backend)
    return turbo


def _check_outputs(to_json: str | None, *inputs: Path | str | None, out: Path | None = None) -> None:
    """Makes sure that files can be written, and that none of them is what is read."""
    from esm_turbo.files.paths import check_apart, check_writable

    if to_json not in (None, "-") and to_json.startswith("-"):
        raise ValueError(f"--json needs a file, or - for standard output; got {to_json}")
    outputs = [path for path in (to_json, out) if path not in (None, "-")]
    for path in outputs:
        check_writable(path)
    check_apart(outputs, [path for path in inputs if path is not None])


def _check_counts(**counts: tuple[int | None, int]) -> None:
    """Makes sure that options are not below their least; each is given with it."""
    for name, (value, least) in counts.items():
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def _list_bad(source: Path, bad: Sequence[BadRecord]) -> None:
    from esm_turbo.cli.console import say

    for one in bad:
        say(f"error: {source}, record {one.record!r}: {one.reason}")


@contextlib.contextmanager
def _unusable(what: str) -> Iterator[None]:
    """Turns any error of reading something into one of unusable input."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {error or type(error).__name__}") from error


if __name__ == "__main__":
    main()
