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

from . import __version__
from .config import DEFAULT_PRESET, Backend
from .options import EmbeddingFormat, Include

if TYPE_CHECKING:
    from .fasta import BadRecord, ProteinRecord
    from .turbo_esm import TurboEsm

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
    from .console import quiet

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
    from .console import say

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
    from .console import progress_bar, quiet_transformers, show, working

    _check_json(json)
    with working("loading libraries"):
        quiet_transformers()
        from .demo import run_demo
        from .report import demo_report

    import torch

    _check_device(device)
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
    toks_per_batch: int = 4096,
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
    from .console import progress_bar, show, working
    from .fasta import read_fasta_strict
    from .paths import check_writable

    _check_json(json)
    check_writable(out)
    records = read_fasta_strict(proteins, unknown=unknown)
    turbo = _load(model, calibration=False, device=device, dtype=dtype)
    from .calibration_run import calibrate_records
    from .report import calibration_report, calibration_result

    with progress_bar("residues") as progress:
        calibration = calibrate_records(
            turbo,
            records,
            source=proteins,
            toks_per_batch=toks_per_batch,
            max_residues=max_residues,
            progress=lambda done, total: progress("calibrate", done, total),
        )
    with working("writing"):
        calibration.save(out)
    show(
        *calibration_report(calibration, out), to_json=json, result=calibration_result(calibration, out)
    )


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
    toks_per_batch: int = 4096,
    truncation_seq_length: int | None = None,
    format: EmbeddingFormat = "pt",
    device: str | None = None,
    dtype: DType | None = None,
    unknown: str | None = None,
    json: JsonFile = None,
) -> int:
    """Embed proteins; names of options and results as in esm-extract.

    Files are named by a hash of the sequence; index.tsv tells which identifier has which. Bad records are listed at
    the end, the others are done.

    Args:
        proteins: FASTA file, plain or gzip.
        out: Folder for one file a sequence; a file for --format h5.
        model: Hub id or folder of an ESM-2 checkpoint; the embedded esm2-mini by default.
        calibration: Of the model, for caches; a file, or auto to calibrate on the shipped proteins.
        preset: What caches are stored as.
        repr_layers: Layers, 0 for the embeddings before the first; negative ones count from the last.
        include: Per-residue states, their mean, those of the cls token (bos), predicted contacts, compressed caches.
        toks_per_batch: Padded tokens of a batch.
        truncation_seq_length: Residues after which a protein is cut; not cut by default.
        format: Files of torch.save, one file of HDF5, or safetensors.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        unknown: X replaces letters that are no residue codes by X instead of leaving the record out.
        json: Write the summary as JSON to this file, - for standard output.
    """
    from .console import say, show
    from .fasta import read_fasta

    _check_json(json)
    if truncation_seq_length is not None and truncation_seq_length < 1:
        raise ValueError(f"--truncation-seq-length must be at least 1, got {truncation_seq_length}")
    if format == "h5" and "cache" in include:
        raise ValueError("caches cannot go into an HDF5 file: take --format safetensors or pt")
    good, bad = read_fasta(proteins, unknown=unknown)
    if not good:
        _list_bad(proteins, bad)
        raise ValueError(f"{proteins}: no usable record; correct those above")
    turbo = _load(model, calibration=calibration, preset=preset, device=device, dtype=dtype)
    cut = [record for record in good if truncation_seq_length and len(record.sequence) > truncation_seq_length]
    failed = _embed(turbo, good, out, repr_layers, include, toks_per_batch, truncation_seq_length, format)
    if cut:
        say(f"warning: {len(cut)} protein{'s' if len(cut) > 1 else ''} cut after {truncation_seq_length} residues")
    bad = [*bad, *failed]
    _list_bad(proteins, bad)
    written, total = len(good) - len(failed), len(good) + len(bad) - len(failed)
    result = {
        "out": os.fspath(out),
        "format": format,
        "written": written,
        "truncated": [record.id for record in cut],
        "failed": [{"record": one.record, "reason": one.reason} for one in bad],
    }
    show(f"{written} of {total} proteins embedded in {out}", to_json=json, result=result)
    return 1 if bad else 0


def _embed(
    turbo: TurboEsm,
    records: Sequence[ProteinRecord],
    out: Path,
    repr_layers: Sequence[int],
    include: Sequence[Include],
    toks_per_batch: int,
    truncation_seq_length: int | None,
    file_format: EmbeddingFormat,
) -> list[BadRecord]:
    """Embeds and writes proteins; returns those that failed."""
    from .console import progress_bar
    from .embedding import EmbeddingRequest, embedding_settings, iter_embeddings
    from .embedding_files import embedding_writer
    from .fasta import BadRecord

    request = EmbeddingRequest.of(turbo, repr_layers, include)
    settings = embedding_settings(turbo, request) | {"truncation_seq_length": truncation_seq_length}
    sequences = [record.sequence[:truncation_seq_length] for record in records]
    batches = iter_embeddings(turbo, sequences, request, toks_per_batch)
    failed, done, total = [], 0, sum(map(len, sequences))
    with embedding_writer(out, file_format, settings) as writer, progress_bar("residues") as progress, _job():
        progress("embed", 0, total)
        for batch in batches:
            for index, embedding in batch:
                if embedding.is_finite():
                    writer.write(records[index], embedding)
                else:
                    failed.append(BadRecord(records[index].id, "its embedding is not finite; try --dtype float32"))
            done += sum(len(sequences[index]) for index, _ in batch)
            progress("embed", done, total)
    return failed


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
        preset: What to evaluate.
        max_proteins: Only the first so many.
        extend_ks: Numbers of new residues at the end of a context.
        refresh_ws: Numbers of the context's last residues that run again with the new ones.
        outlier_scales: Sizes of outliers planted into keys and values.
        device: Where the model runs, such as cpu, cuda or mps; the best there is by default.
        dtype: Of the model; float32 on CPU and MPS and the checkpoint's on CUDA by default.
        backend: What runs the attention over compressed caches.
        unknown: X replaces letters that are no residue codes by X instead of refusing them.
        json: Write the figures as JSON to this file, - for standard output.
    """
    from .config import TurboConfig
    from .console import progress_bar, show, width
    from .fasta import read_fasta_strict

    _check_json(json)
    if not preset:
        raise ValueError("--preset must name at least one preset")
    for name in preset:
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
            progress=progress,
        )
    show(result.table(width()), to_json=json, result=result.to_dict())


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
    """What a model, a calibration or a cache is, and what caches take; the environment if nothing is named.

    Args:
        target: Hub id or folder of an ESM-2 checkpoint, or a file written by this program.
        calibration: Of the model, to count the bytes of its own caches.
        length: Tokens of each protein, special tokens included, for the bytes of caches.
        batch: Proteins in a cache, likewise.
        json: Write the same as JSON to this file, - for standard output.
    """
    from .console import quiet_transformers, show, working

    _check_json(json)
    with working("loading libraries"):
        quiet_transformers()
    from .assets import EMBEDDED_MODEL
    from .info import file_info, model_info
    from .report import info_report

    with _unusable(f"{target} cannot be read"):
        if target is not None and Path(target).is_file():
            result = file_info(target, length, batch)
        else:
            result = model_info(EMBEDDED_MODEL if target is None else target, calibration, length, batch)
    if target is None:
        from .env import environment

        result["environment"] = environment()
    show(*info_report(result), to_json=json, result=result)


def _load(model: str | None, *, calibration: str | Literal[False] | None, **options: Any) -> TurboEsm:
    """Loads a model; whatever goes wrong, it is the input that cannot be used."""
    from .console import progress_bar, quiet_transformers, working

    options = {name: value for name, value in options.items() if value is not None}
    _check_device(options.get("device"))
    with _unusable(f"{model or 'the embedded model'} cannot be loaded"):
        with working("loading the model"):
            quiet_transformers()
            from .turbo_esm import TurboEsm

            turbo = TurboEsm.from_pretrained(
                model, calibration=False if calibration == "auto" else calibration, **options
            )
        if calibration == "auto":
            from .auto_calibration import auto_calibration

            with progress_bar("residues") as progress:
                made = auto_calibration(turbo, lambda done, total: progress("calibrate", done, total))
            own = turbo.model.esm
            own.set_turbo(calibration=made, preset=own.turbo_config, backend=own.backend)
    return turbo


def _check_json(to_json: str | None) -> None:
    from .paths import check_writable

    if to_json is not None and to_json != "-":
        if to_json.startswith("-"):
            raise ValueError(f"--json needs a file, or - for standard output; got {to_json}")
        check_writable(to_json)


def _check_device(device: str | None) -> None:
    if device is not None:
        import torch

        with _unusable(f"--device {device} cannot be used here"):
            torch.empty(0, device=device)


def _list_bad(source: Path, bad: Sequence[BadRecord]) -> None:
    from .console import say

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


@contextlib.contextmanager
def _job() -> Iterator[None]:
    """Turns an error of a job that has begun to write into its failure."""
    try:
        yield
    except ValueError as error:
        raise JobError(str(error)) from error


if __name__ == "__main__":
    main()
