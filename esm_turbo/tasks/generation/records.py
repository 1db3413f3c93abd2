"""Generating from the records of a FASTA file, as `esm-turbo generate` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from esm_turbo.files.identity import exact_identity
from esm_turbo.model.memory import available_bytes
from esm_turbo.proteins.batches import token_batches
from esm_turbo.proteins.fasta import UNKNOWN, BadRecord, ProteinRecord, check_identifiers
from esm_turbo.tasks.common.context_sources import ContextSource
from esm_turbo.tasks.common.forwards import default_storage, protein_tokens
from esm_turbo.tasks.common.memory import halve_until_it_fits, size_text, too_large
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.common.run_info import RUN_COLUMNS, RunInfo
from esm_turbo.tasks.common.same_model import refuse_changed
from esm_turbo.tasks.generation.generate import allowed_residues, check_constrained_positions, generate_batch
from esm_turbo.tasks.generation.notation import format_positions, residues_at
from esm_turbo.tasks.generation.options import GenerationOptions
from esm_turbo.tasks.generation.sampling import row_seeds

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Python objects of a sample, and of the position and log-probability of a new residue.
_SAMPLE_BYTES, _NEW_BYTES = 1000, 72


@dataclass(frozen=True)
class GeneratedSequence:
    """One generated sequence.

    Attributes:
        record: identifier of the input protein.
        sample: number of the sample for that protein, from 1.
        sequence: all residues, given and new.
        positions: positions of the new residues, counted from 1.
        log_probs: see `GenerationOutput`.
        seed: seed of this row: `generate(sequence, seed=seed, ...)` reproduces it; None if it is not known.
    """

    record: str
    sample: int
    sequence: str
    positions: list[int]
    log_probs: list[float]
    seed: int | None

    def fasta(self, run: RunInfo | None = None) -> str:
        """FASTA entry whose header gives the new positions and residues, their mean log-probability and the seed.

        With a `run`, also what it used.
        """
        names, cells = ((), []) if run is None else (RUN_COLUMNS, run.cells())
        used = "".join(f" {name}={'_'.join(cell.split())}" for name, cell in zip(names, cells, strict=True))
        mean = sum(self.log_probs) / len(self.log_probs)
        new = residues_at(self.sequence, self.positions)
        return (
            f">{self.record}_{self.sample} positions={format_positions(self.positions)} new={new}"
            f" mean_log_prob={mean:.4f} seed={self.seed}{used}\n{self.sequence}\n"
        )


def generate_records(
    turbo: ContextModel,
    records: Sequence[ProteinRecord],
    options: GenerationOptions,
    *,
    seed: int = 0,
    mask_letter: str | None = None,
    toks_per_batch: int | None = None,
    store: ContextSource | None = None,
    progress: Progress | None = None,
) -> tuple[list[GeneratedSequence], list[BadRecord]]:
    """Generate from every record. Those for which it is impossible are set apart and reported.

    Results do not depend on batches; they depend on the preceding records only through the seeds derived from `seed`.

    Args:
        records: the input proteins.
        options: see `GenerationOptions`; the same for all records, also `positions`.
        seed: seed from which those of all rows are derived.
        mask_letter: letter that stands for `<mask>` in the records, one that is no particular residue.
        toks_per_batch: padded tokens per batch, in which every sample is a row; None is 16,384 on CUDA, and else 4,096.
        store: as of `generate`.
        progress: called with stage `generate` and samples, see `Progress`.

    Returns:
        The sequences in the order of the records, and the bad records with the reason.

    Raises:
        ValueError: an identifier names two proteins, there is a list of positions for each record, no residue is
            allowed, the preset needs a calibration and there is none, the results do not fit into memory, or the model
            changes meanwhile.
    """
    if mask_letter is not None and mask_letter not in UNKNOWN:
        raise ValueError(f"`mask_letter` must be one of {', '.join(UNKNOWN)}, got {mask_letter!r}")
    check_identifiers(records)
    # Batches are sorted by length, so that lists would go to other records.
    if any(isinstance(one, Iterable) for one in options.positions or ()):
        raise ValueError("`positions` of records must be one list for all of them")
    # Errors that concern all records are raised before any of them runs.
    constraint = allowed_residues(turbo, options)
    with default_storage(turbo):
        turbo.model.base_model.codec(turbo.model.base_model.turbo_config)
    samples = options.num_return_sequences
    _check_results(records, options)
    counter = StageProgress(progress, "generate", len(records) * samples)
    seeds = row_seeds(seed, len(records) * samples)
    sizes = [len(record.sequence) + 2 + (options.max_new_tokens or 0) for record in records for _ in range(samples)]
    generated: dict[int, GeneratedSequence] = {}
    bad: dict[int, BadRecord] = {}

    def run(rows: Sequence[int]) -> None:
        """Generate some of the rows, of which each record has one per sample."""
        rows = [row for row in rows if row // samples not in bad]
        own = sorted({row // samples for row in rows})
        if not rows:
            return
        sequences = [records[row // samples].sequence for row in rows]
        if mask_letter is not None:
            sequences = [sequence.replace(mask_letter, "<mask>") for sequence in sequences]
        try:
            one = replace(options, num_return_sequences=1)
            output = generate_batch(turbo, sequences, one, [seeds[row] for row in rows], store)
        except ValueError as error:
            if len(own) > 1:
                # A single record may be the cause, for example if it is too short for a position.
                for index in own:
                    run([row for row in rows if row // samples == index])
            else:
                [index] = own
                bad[index] = BadRecord(records[index].id, str(error).removeprefix("sequence 1: "))
            return
        for number, row in enumerate(rows):
            index, sample = divmod(row, samples)
            results = output.sequences[number], output.positions[number], output.log_probs[number]
            try:
                # As of the record alone, which its seed reproduces.
                check_constrained_positions(constraint, [results[1]])
            except ValueError as error:
                bad[index] = BadRecord(records[index].id, str(error))
            generated[row] = GeneratedSequence(records[index].id, sample + 1, *results, seeds[row])

    def too_large_alone(row: int, error: Exception) -> None:
        record = records[row // samples]
        bad[row // samples] = BadRecord(record.id, too_large(len(record.sequence), turbo.model.device, error))

    begun = exact_identity(turbo.model)
    with turbo.model.base_model.kv.in_call():
        counter.advance(0)
        for batch in token_batches(sizes, protein_tokens(toks_per_batch, turbo)):
            halve_until_it_fits(run, batch, too_large_alone)
            counter.advance(len(batch))
    refuse_changed(turbo, begun)
    in_order = [generated[row] for row in sorted(generated) if row // samples not in bad]
    return in_order, [bad[index] for index in sorted(bad)]


def _check_results(records: Sequence[ProteinRecord], options: GenerationOptions) -> None:
    """Check that the generated sequences can be held in memory.

    Raises:
        ValueError: they cannot.
    """
    free = available_bytes(torch.device("cpu"))
    residues = sum(len(record.sequence) for record in records)
    # Positions are the same for all records, or else no more than the residues.
    own = options.max_new_tokens or len(options.positions or ())
    new = own * len(records) if own else residues
    needed = options.num_return_sequences * (_SAMPLE_BYTES * len(records) + residues + _NEW_BYTES * new)
    if free is not None and needed > free:
        raise ValueError(
            f"the sequences asked for and their log-probabilities need about {size_text(needed)} of memory,"
            f" {size_text(free)} are free; generate fewer or shorter ones at a time"
        )
