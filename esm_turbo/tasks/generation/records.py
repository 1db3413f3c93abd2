"""Generation for the records of a FASTA file: what `esm-turbo generate` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from esm_turbo.config import DEFAULT_TOKS_PER_BATCH
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord, token_batches
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.generation.generate import GenerationOptions, GenerationOutput, generate
from esm_turbo.tasks.generation.sampling import row_seeds

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Far beyond the longest protein.
_MOST_POSITIONS = 1_000_000


@dataclass(frozen=True)
class Generated:
    """One generated sequence.

    Attributes:
        record: identifier of the protein that it was made from.
        sample: which of that protein's, from 1.
        sequence: all residues, given and new.
        positions: of the new residues, counted from 1.
        log_probs: see `GenerationOutput`.
        seed: of this row: `generate(sequence, seed=seed, ...)` makes it again.
    """

    record: str
    sample: int
    sequence: str
    positions: list[int]
    log_probs: list[float]
    seed: int

    def fasta(self) -> str:
        """An entry whose header says what is new, and how likely the model found it."""
        mean = sum(self.log_probs) / len(self.log_probs)
        return (
            f">{self.record}_{self.sample} positions={format_positions(self.positions)} mean_log_prob={mean:.4f}"
            f" seed={self.seed}\n{self.sequence}\n"
        )


def generate_records(
    turbo: ContextModel,
    records: Sequence[ProteinRecord],
    options: GenerationOptions,
    *,
    seed: int = 0,
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    progress: Progress | None = None,
) -> tuple[list[Generated], list[BadRecord]]:
    """Generates from every record that it is possible for.

    What is made of a record depends on the records before it only through the seed that it has, so not on batches.

    Args:
        turbo: the model.
        records: what to begin with.
        options: what to generate and how, the same for all.
        seed: from which those of all rows follow.
        toks_per_batch: padded tokens of a batch.
        progress: called with stage `generate` and records, see `Progress`.

    Returns:
        The sequences in the order of the records, and the records that nothing could be made of, with the reason.

    Raises:
        ValueError: no residue may be generated, or the preset needs a calibration and there is none.
    """
    options.constraint(turbo)
    turbo.model.new_cache()
    samples = options.num_return_sequences
    counter = StageProgress(progress, "generate", len(records))
    seeds = row_seeds(seed, len(records) * samples)
    sizes = [(len(record.sequence) + 2 + (options.max_new_tokens or 0)) * samples for record in records]
    found: dict[int, list[Generated]] = {}
    bad: dict[int, BadRecord] = {}
    counter.advance(0)

    def run(batch: Sequence[int]) -> None:
        own = [seeds[index * samples + k] for index in batch for k in range(samples)]
        try:
            output = generate(turbo, [records[index].sequence for index in batch], options, own)
        except ValueError as error:
            if len(batch) > 1:
                # One record may be the cause, such as one too short for a position.
                for index in batch:
                    run([index])
            else:
                [index] = batch
                bad[index] = BadRecord(records[index].id, str(error).removeprefix("sequence 1: "))
            return
        for place, index in enumerate(batch):
            found[index] = _of_record(records[index], output, own, range(place * samples, (place + 1) * samples))

    for batch in token_batches(sizes, toks_per_batch):
        run(batch)
        counter.advance(len(batch))
    generated = [one for index in sorted(found) for one in found[index]]
    return generated, [bad[index] for index in sorted(bad)]


def _of_record(record: ProteinRecord, output: GenerationOutput, seeds: Sequence[int], rows: range) -> list[Generated]:
    return [
        Generated(record.id, sample, output.sequences[row], output.positions[row], output.log_probs[row], seeds[row])
        for sample, row in enumerate(rows, start=1)
    ]


def parse_positions(text: str) -> list[int]:
    """Positions written as `10-25,40`.

    Raises:
        ValueError: it is written otherwise.
    """
    positions: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"positions are written as 10-25,40 and counted from 1, got {text!r}")
        span = range(int(first), int(last or first) + 1)
        if span.stop > _MOST_POSITIONS:
            raise ValueError(f"no protein has a position {span.stop - 1:,}, got {part.strip()!r}")
        if not span or span[0] < 1:
            raise ValueError(f"positions are counted from 1, from the lower to the higher, got {part.strip()!r}")
        positions += span
    return positions


def format_positions(positions: Sequence[int]) -> str:
    """Inverse of `parse_positions`, for positions in order."""
    spans: list[list[int]] = []
    for position in positions:
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_allowed(items: Sequence[str]) -> str | Mapping[int, str] | None:
    """Constraints written as `ACDE` for all positions, or as `10=AG 12-15=HP` by position.

    Raises:
        ValueError: they are written otherwise, or both ways.
    """
    if not items:
        return None
    if len(items) == 1 and "=" not in items[0]:
        return items[0]
    by_position: dict[int, str] = {}
    for item in items:
        where, equals, letters = item.partition("=")
        if not equals:
            raise ValueError(
                f"constraints are letters for all positions, or as 10=AG 12-15=HP; got {' '.join(items)!r}"
            )
        by_position |= dict.fromkeys(parse_positions(where), letters)
    return by_position
