"""`esm-turbo generate`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

from esm_turbo.cli.console import progress_bar, save_text, show
from esm_turbo.cli.inputs import announce, check_minimum, list_bad, load_model, opened_store, read_proteins, readable
from esm_turbo.cli.options import (
    MANY,
    NO_DEFAULT,
    CacheOptions,
    InputFile,
    JsonFile,
    PictureFile,
    ProteinBatchTokens,
    SequenceFile,
    SequenceOptions,
    StoreFolder,
)
from esm_turbo.cli.pictures import check_plot, save_plot
from esm_turbo.cli.report import failures
from esm_turbo.files.tabular import counted
from esm_turbo.tasks.common.options import UnmaskingOrder


def generate(
    proteins: InputFile,
    /,
    *,
    max_new_tokens: int | None = None,
    positions: str | None = None,
    mask_letter: str | None = None,
    order: UnmaskingOrder | None = None,
    per_step: int = 1,
    sweeps: int = 1,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    allowed: Annotated[tuple[str, ...], MANY, NO_DEFAULT] = (),
    banned: Annotated[str, NO_DEFAULT] = "",
    seed: int = 0,
    refresh: int | None = None,
    refresh_every: int | None = None,
    toks_per_batch: ProteinBatchTokens = None,
    out: SequenceFile = None,
    json: JsonFile = None,
    plot: PictureFile = None,
    letters: SequenceOptions = SequenceOptions(),
    store: StoreFolder = None,
    model: CacheOptions = CacheOptions(),
) -> int:
    """Generate residues after proteins (--max-new-tokens) or in them (--positions, --mask-letter).

    Writes FASTA whose headers give the positions of the new residues, their mean log-probability, and what the run
    used. Bad records are reported at the end; all others are used.

    Args:
        proteins: FASTA file, plain or gzip.
        max_new_tokens: Number of residues to append to each protein.
        positions: Residues to replace, counted from 1, such as 10-25,40.
        mask_letter: Letter that stands for residues to generate in the file: X, B or Z.
        order: Order in which the positions are sampled, random by default.
        per_step: Positions of a protein to sample per step.
        sweeps: How many times each position is sampled; from the second time on, given all others (Gibbs sampling).
        num_return_sequences: Samples per protein.
        temperature: Divides the logits; 0 takes the most likely residue.
        top_k: Sample from the k most likely residues only.
        top_p: Sample from the most likely residues only, those whose probabilities add up to p.
        allowed: Residues that may be generated: ACDE, or by position, as in 10=AG 12-15=HP.
        banned: Residues that are never generated.
        seed: Seed of the samples; the same seed gives the same residues on the same backend.
        refresh: Residues next to the new ones that are recomputed with them, 8 by default.
        refresh_every: Steps from one refresh to the next; by default 1 with --max-new-tokens, 8 in place.
        out: FASTA file to write. By default, standard output.
    """
    given = sum(one is not None for one in (max_new_tokens, positions, mask_letter))
    if given != 1:
        raise ValueError(
            "give --max-new-tokens to append residues, or --positions or --mask-letter to replace some"
            + (", only one of them" if given else "")
        )
    if store is not None and max_new_tokens is None:
        raise ValueError("--store holds contexts to append to; in place, the protein is computed with masks instead")
    check_minimum(1, toks_per_batch=toks_per_batch)
    good, bad = read_proteins(proteins, letters)
    check_plot(plot, len(good))
    turbo = load_model(model)
    good = readable(turbo, proteins, good, bad)
    from esm_turbo.tasks.common.forwards import default_storage
    from esm_turbo.tasks.common.run_info import context_arm
    from esm_turbo.tasks.generation.generate import GenerationOptions
    from esm_turbo.tasks.generation.notation import parse_allowed, parse_positions
    from esm_turbo.tasks.generation.records import generate_records

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
    with default_storage(turbo):
        used = announce(turbo, [context_arm(turbo)])
    with opened_store(store, turbo) as contexts, progress_bar("samples") as progress:
        generated, failed = generate_records(
            turbo,
            good,
            options,
            seed=seed,
            mask_letter=mask_letter,
            toks_per_batch=toks_per_batch,
            store=contexts,
            progress=progress,
        )
    bad = [*bad, *failed]
    list_bad(proteins, bad)
    if not generated:
        raise ValueError(f"{proteins}: nothing could be generated from any record")
    fasta = "".join(one.fasta(used) for one in generated)
    if out is not None:
        save_text(out, fasta)
    result = {
        "run": used.to_dict(),
        "out": None if out is None else os.fspath(out),
        "sequences": [asdict(one) for one in generated],
        "failed": failures(bad),
    }
    text = fasta.rstrip("\n") if out is None else f"{counted(len(generated), 'sequence')} written to {out}"
    show(text, to_json=json, result=result)
    save_plot(plot, generated, used, good)
    return 1 if bad else 0
