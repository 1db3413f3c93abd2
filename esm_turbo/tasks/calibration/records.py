"""Calibrating a model on protein records, as `esm-turbo calibrate` and `calibration="auto"` do.

The proteins are divided into pieces of a few batches, whose statistics are merged in the order of the pieces, whoever
computes them: on a CPU the result has the same bits for any number of processes with the same number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.calibrate import KVCalibrator, PartialStatistics
from esm_turbo.config import PRODUCT_PRESETS, TurboConfig
from esm_turbo.files.identity import exact_identity
from esm_turbo.proteins.batches import token_batches
from esm_turbo.proteins.fasta import ProteinRecord, sha256_file
from esm_turbo.proteins.homologs import SEPARATOR, encode_homologs, join_families
from esm_turbo.proteins.limits import length_bin, warn_if_long
from esm_turbo.tasks.common.forwards import protein_tokens
from esm_turbo.tasks.common.pieces import InProcessRunner, Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.same_model import refuse_changed, run_on_model

if TYPE_CHECKING:
    from esm_turbo.calibration import Calibration
    from esm_turbo.context_model import ContextModel

NO_CLASS = "unknown"

Counts = dict[str, dict[str, int]]
"""Numbers of sequences and residues, by class or by length."""

# Batches of a piece: its statistics are hundreds of megabytes for large models, of which each batch has a part.
_BATCHES_PER_PIECE = 4
_HELD_OUT = 10
_STAGE = "calibrate"
_Piece = Sequence[Sequence[ProteinRecord]]
"""Proteins by batch."""


@dataclass(frozen=True)
class _CalibrationTask:
    """Gathers the statistics of pieces; of one that no process survives, the reason."""

    def run(
        self, turbo: ContextModel, pieces: Iterable[_Piece], progress: Progress
    ) -> Iterator[PartialStatistics | str]:
        calibrator, codes = KVCalibrator(turbo.model), turbo.codes
        for piece in pieces:
            done, total = 0, _residues(piece)
            for batch in piece:
                rows, positions = codes.present([_encoded(turbo, record) for record in batch])
                calibrator.partial_fit(*codes.batch(rows), None if positions is None else codes.batch(positions)[0])
                done += _residues([batch])
                progress(_STAGE, done, total)
            yield calibrator.take()

    def failed(self, piece: _Piece, reason: str) -> PartialStatistics | str:
        return reason

    def has_failed(self, result: PartialStatistics | str) -> bool:
        return isinstance(result, str)


def _encoded(turbo: ContextModel, record: ProteinRecord) -> list[int]:
    codes, limits = turbo.codes, turbo.model.base_model.exact_contexts
    if limits is not None:
        return encode_homologs(codes, record, record.id, limits)
    return [codes.cls, *codes.encode(record.sequence, record.id), codes.eos]


def _residues(piece: _Piece) -> int:
    return sum(_num_residues(record) for batch in piece for record in batch)


def _num_residues(record: ProteinRecord) -> int:
    """Of all sequences of a record."""
    return len(record.sequence) - record.sequence.count(SEPARATOR)


def calibrate_records(
    turbo: ContextModel,
    records: Sequence[ProteinRecord],
    *,
    source: str | os.PathLike[str] | None = None,
    presets: Iterable[str | TurboConfig] = PRODUCT_PRESETS,
    toks_per_batch: int | None = None,
    max_residues: int | None = None,
    progress: Progress | None = None,
    runner: Runner | None = None,
) -> Calibration:
    """Calibrate a model on proteins. The model is not changed.

    The result depends on the order of the proteins and on `toks_per_batch` by rounding only, and not on the runner.

    Args:
        records: the proteins; for a family with exact contexts, such as E1, those of families of homologs, with
            `family=NAME` in their headers.
        source: the FASTA file of the proteins, whose name and SHA-256 are recorded.
        presets: the presets whose codecs are fitted now; others are fitted on first use.
        toks_per_batch: padded tokens per batch; None is 16,384 on CUDA devices and 4,096 on others.
        max_residues: see `first_records`.
        progress: called with stage `calibrate` and residues, see `Progress`.
        runner: where pieces are computed; None is this process.

    Returns:
        The calibration. Its provenance has counts by class and by length.

    Raises:
        ValueError: there are fewer residues than components per head, or no families of homologs for exact contexts,
            an option is not positive, the model's weights are not finite, or they change meanwhile.
        RuntimeError: no process survives some of the proteins.
    """
    if turbo.model.base_model.exact_contexts is not None:
        records = join_families(records)
    records = first_records(records, max_residues)
    # Before anything is computed: the file may change meanwhile.
    made_from = provenance(turbo, records, source)
    lengths = [len(record.sequence) for record in records]
    runner = InProcessRunner(turbo) if runner is None else runner
    batches = token_batches([length + 2 for length in lengths], protein_tokens(toks_per_batch, turbo, runner.devices))
    if turbo.model.base_model.exact_contexts is None:
        warn_if_long(lengths, turbo.model.family)
    begun = exact_identity(turbo.model)
    calibrator = KVCalibrator(turbo.model)
    # The longest first, so that a lack of memory shows at once.
    batched = [[records[i] for i in batch] for batch in reversed(batches)]
    pieces = [batched[first : first + _BATCHES_PER_PIECE] for first in range(0, len(batched), _BATCHES_PER_PIECE)]
    arrived: dict[int, PartialStatistics] = {}
    units = [_residues(piece) for piece in pieces]
    following = 0
    run = run_on_model(turbo, runner, _CalibrationTask(), pieces, stage=_STAGE, units=units, progress=progress)
    for number, result in run:
        if isinstance(result, str):
            names = ", ".join(record.id for batch in pieces[number] for record in batch)
            raise RuntimeError(f"the calibration cannot be finished: {result}, with these proteins: {names}")
        arrived[number] = result
        while following in arrived:
            calibrator.merge(arrived.pop(following))
            following += 1
    refuse_changed(turbo, begun)
    return calibrator.finalize(presets, made_from)


def first_records(records: Sequence[ProteinRecord], max_residues: int | None = None) -> list[ProteinRecord]:
    """The first proteins with at most `max_residues` residues in total; all of them for None.

    Raises:
        ValueError: `max_residues` is less than the first protein's length.
    """
    if max_residues is None:
        return list(records)
    chosen, total = [], 0
    for record in records:
        total += _num_residues(record)
        if total > max_residues:
            break
        chosen.append(record)
    if records and not chosen:
        raise ValueError(
            f"`max_residues` must be at least the first protein's {_num_residues(records[0])}, got {max_residues}"
        )
    return chosen


def hold_out(records: Sequence[ProteinRecord]) -> tuple[list[ProteinRecord], list[ProteinRecord]]:
    """Divide proteins into those of a calibration and every tenth, on which it can be measured."""
    kept = [record for number, record in enumerate(records, 1) if number % _HELD_OUT]
    return kept, list(records[_HELD_OUT - 1 :: _HELD_OUT])


def provenance(
    turbo: ContextModel, records: Sequence[ProteinRecord], source: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Provenance of a calibration: its model and proteins, as JSON values.

    Folder names are left out, so that a shared file does not reveal local paths.
    """
    own = [replace(record, sequence=one) for record in records for one in record.sequence.split(SEPARATOR)]
    record: dict[str, Any] = {
        "model": turbo.name,
        "classes": counts_by(own, lambda r: r.structural_class or NO_CLASS),
        "lengths": counts_by(sorted(own, key=lambda r: len(r.sequence)), lambda r: length_bin(len(r.sequence))),
    }
    if turbo.model.base_model.exact_contexts is not None:
        # A calibrator counts rows, and tokens of homologs.
        record |= {"sequences": len(own), "residues": sum(len(one.sequence) for one in own)}
    if source is not None:
        record["fasta"] = {"name": Path(source).name, "sha256": sha256_file(source)}
    return record


def counts_by(records: Iterable[ProteinRecord], key: Callable[[ProteinRecord], str]) -> Counts:
    """Numbers of sequences and residues per group, in order of first appearance."""
    counts: Counts = {}
    for record in records:
        group = counts.setdefault(key(record), {"sequences": 0, "residues": 0})
        group["sequences"] += 1
        group["residues"] += len(record.sequence)
    return counts
