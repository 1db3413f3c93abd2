"""`esm-turbo embed`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from esm_turbo.cli.console import progress_bar, say, show
from esm_turbo.cli.inputs import announce, check_minimum, list_bad, opened_store, read_proteins, readable
from esm_turbo.cli.interrupts import interrupts
from esm_turbo.cli.options import (
    MANY,
    NO_DEFAULT,
    CacheOptions,
    InputFile,
    JsonFile,
    ParallelOptions,
    ProteinBatchTokens,
    SequenceOptions,
    StoreFolder,
    Writes,
)
from esm_turbo.cli.parallel import Spread
from esm_turbo.cli.report import failures
from esm_turbo.cli.sharding import Sharding
from esm_turbo.files.kinds import INDEX_FILE
from esm_turbo.files.suffixes import embedding_format
from esm_turbo.files.writing import parts_folder
from esm_turbo.parallel.shards import Kind
from esm_turbo.tasks.common.options import ONE_FILE, EmbeddingFormat, FileNames, Include


def embed(
    proteins: InputFile,
    out: Annotated[Path, Writes("embeddings")],
    /,
    *,
    repr_layers: Annotated[tuple[int, ...], MANY] = (-1,),
    include: Annotated[tuple[Include, ...] | None, MANY, NO_DEFAULT] = None,
    toks_per_batch: ProteinBatchTokens = None,
    truncation_seq_length: int | None = None,
    window: int | None = None,
    overlap: int | None = None,
    memory: int | None = None,
    format: EmbeddingFormat | None = None,
    names: FileNames | None = None,
    nogpu: Annotated[bool, Parameter(negative="")] = False,
    json: JsonFile = None,
    letters: SequenceOptions = SequenceOptions(),
    store: StoreFolder = None,
    model: CacheOptions = CacheOptions(),
    parallel: ParallelOptions = ParallelOptions(),
) -> int:
    """Embed proteins, with the option names and results of esm-extract.

    index.tsv maps identifiers to files, whose names --names decides. Bad records are reported at the end; all others
    are embedded. After an interruption, the same command continues where it stopped.

    Args:
        proteins: FASTA file, plain or gzip.
        out: Folder with one file per sequence, to which proteins may be added; one file for HDF5 and Parquet.
        repr_layers: Layers to save; 0 is the input of the first layer, negative numbers count from the last.
        include: What to save: mean and per-residue hidden states, the hidden state of the cls token (bos), predicted
            contacts, compressed caches. By default mean and per_tok; for Parquet, mean.
        truncation_seq_length: Truncate proteins to this number of residues. By default, they are not truncated.
        window: Compute longer proteins in windows of this number of residues. By default, they are computed whole.
        overlap: Residues that consecutive windows share, 64 by default.
        memory: Number of residues before each window to attend to through the compressed cache. By default, the value
            of --window.
        format: Output format: files of torch.save (pt), one HDF5 file (h5), safetensors files, or means as a table
            (parquet). By default, h5 if OUT ends in .h5 or .hdf5, parquet if it ends in .parquet, and else pt.
        names: Names of files: label, the identifier, as esm-extract names them, where that is a safe and unique name,
            and else a hash; or hash of the sequence. By default label, or as in the folder.
        nogpu: Same as --device cpu, as in esm-extract.
    """
    if nogpu and model.device not in (None, "cpu"):
        raise ValueError(f"--nogpu is --device cpu, but there is --device {model.device}; give one of them")
    if nogpu:
        model = replace(model, device="cpu")
    spread = Spread.of(parallel, model)
    format = embedding_format(out, format)
    include = include or (("mean",) if format == "parquet" else ("mean", "per_tok"))
    kind: Kind = ONE_FILE.get(format, "embeddings")
    # Shards are folders, of which `merge` makes the file.
    written: EmbeddingFormat = "safetensors" if parallel.shard is not None and format in ONE_FILE else format
    sharding = Sharding("embed", kind, parallel.shard, out, [proteins])
    assert sharding.out is not None
    check_minimum(1, truncation_seq_length=truncation_seq_length, toks_per_batch=toks_per_batch)
    if store is not None and "cache" not in include:
        raise ValueError("--store keeps compressed caches; give --include cache as well")
    from esm_turbo.tasks.embedding.one_file import ONE_FILE_FORMATS
    from esm_turbo.tasks.embedding.windows import Windows

    if format in ONE_FILE_FORMATS:
        ONE_FILE_FORMATS[format].check(out, include)
    windows = Windows.of(window, overlap, memory)
    good, bad = read_proteins(proteins, letters)
    turbo = spread.load()
    good = readable(turbo, proteins, good, bad)
    from esm_turbo.tasks.common.forwards import protein_tokens
    from esm_turbo.tasks.common.run_info import context_arm
    from esm_turbo.tasks.embedding.embed import embedding_settings
    from esm_turbo.tasks.embedding.records import embed_records
    from esm_turbo.tasks.embedding.request import EmbeddingRequest

    toks_per_batch = protein_tokens(toks_per_batch, turbo, spread.devices)
    cut = [record for record in good if truncation_seq_length and len(record.sequence) > truncation_seq_length]
    opened = opened_store(store, turbo, alone=spread.devices is None)
    with opened as contexts, spread.runner() as runner, progress_bar("residues") as progress:
        request = EmbeddingRequest.of(turbo, repr_layers, include, windows, contexts)
        options = {"format": format, "names": names, "toks_per_batch": toks_per_batch, **asdict(letters)}
        options |= {"truncation_seq_length": truncation_seq_length}
        if sharding.is_done(lambda: embedding_settings(turbo, request) | options):
            return 0
        used = announce(turbo, [context_arm(turbo)] if request.writes_contexts else [], spread.devices)
        # An index is written with the first embedding that is kept.
        indices = [folder / INDEX_FILE for folder in (sharding.out, parts_folder(sharding.out))]
        with interrupts.resume_by_command(lambda: any(path.exists() for path in indices)):
            run = embed_records(
                turbo,
                good,
                sharding.out,
                request,
                file_format=written,
                names="hash" if written != format else names,
                toks_per_batch=toks_per_batch,
                truncation_seq_length=truncation_seq_length,
                progress=progress,
                runner=runner,
                plan=sharding.plan,
            )
    sharding.finish(used, [*bad, *run.failed], run.numbers)
    for damaged in run.damaged:
        say(f"warning: {damaged}: was damaged, or of another sequence, and has been replaced")
    if cut:
        say(f"warning: {len(cut)} protein{'s' if len(cut) > 1 else ''} truncated to {truncation_seq_length} residues")
    total = len(good) + len(bad)
    bad = [*bad, *run.failed]
    list_bad(proteins, bad)
    result = {
        "run": used.to_dict(),
        "out": os.fspath(out),
        "format": format,
        "written": run.written,
        "reused": run.reused,
        "damaged": run.damaged,
        "truncated": [record.id for record in cut],
        "failed": failures(bad),
    }
    reused = f" ({run.reused} of them earlier)" if run.reused else ""
    show(f"{run.written} of {total} proteins embedded in {sharding.out}{reused}", to_json=json, result=result)
    return sharding.exit_code(bad)
