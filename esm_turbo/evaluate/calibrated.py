"""Measure a new calibration: its presets and the freezing error, on proteins that it has not seen."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from esm_turbo.assets import evaluation_families, evaluation_proteins
from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.evaluate.families import after_homologs
from esm_turbo.evaluate.precision import choose_products, figures_of
from esm_turbo.evaluate.protocols import Protein, extend_at_end, leave_one_out
from esm_turbo.files.quality import EXPECTED, Quality
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta_strict, sha256_residues
from esm_turbo.proteins.homologs import SEPARATOR, join_families
from esm_turbo.tasks.common.forwards import FROZEN
from esm_turbo.tasks.common.progress import Progress, StageProgress

if TYPE_CHECKING:
    from esm_turbo.calibration import Calibration
    from esm_turbo.context_model import ContextModel
    from esm_turbo.model.precision import Precision

_log = logging.getLogger("esm_turbo")
# Residues of the calibration for each residue measured, and the fewest to measure: 1 % quantiles rest on ten of them.
_CALIBRATED_PER_MEASURED, _FEWEST_MEASURED = 64, 1000
_NEW_RESIDUES, _REFRESHED = 8, (0, DEFAULT_REFRESH, 32)


def measure_calibration(
    turbo: ContextModel,
    calibration: Calibration,
    records: Sequence[ProteinRecord],
    held_out: Sequence[ProteinRecord] | None = None,
    progress: Progress | None = None,
    precision: Precision | None = None,
) -> Quality | None:
    """Measure the presets of a calibration on proteins that are not part of it, and the freezing error of its model.

    Args:
        turbo: the model, which is not changed.
        calibration: of this model.
        records: the proteins of the calibration.
        held_out: other proteins, of which the first are measured: up to a thousand residues, or one for 64 of the
            calibration's if these are more; None takes the shipped evaluation proteins.
        progress: called with stage `measure` and residues, see `Progress`.
        precision: also measure what this precision costs, of a model in bfloat16, see `evaluate.precision`.

    Returns:
        The figures; None if all of `held_out` are, or hold, parts of `records`. A warning tells if few are left.

    Raises:
        ValueError: outputs of a preset contain NaN or infinity.
    """
    has_families = turbo.model.base_model.exact_contexts is not None
    records = join_families(records) if has_families else records
    proteins = _measured(beside_shipped((), has_families) if held_out is None else held_out, records)
    if (residues := sum(map(len, proteins))) < _FEWEST_MEASURED // 2:
        _log.warning("the calibration is measured on %s residues: other proteins are, or hold, parts of it", residues)
    if not proteins:
        return None
    configs = {config.name: config for config in calibration.fitted if config.name in EXPECTED}
    counter, lengths = StageProgress(progress, "measure", residues), iter(map(len, proteins))
    with _calibrated(turbo, calibration):
        turbo.model.base_model.kv.compile_ahead(*map(calibration.codec, [FROZEN, *configs.values()]))
        # A small part of the work, which is not counted, so that the time left can be told from what is.
        ends = {} if has_families else extend_at_end(turbo, proteins, {}, [_NEW_RESIDUES], _REFRESHED, lambda _: None)
        counter.advance(0)

        def advance(count: int) -> None:
            counter.advance(sum(islice(lengths, count)))

        if has_families:
            loo = after_homologs(turbo, proteins, configs, advance)
        else:
            loo = leave_one_out(turbo, proteins, configs, advance, layers=False)
    return Quality(
        proteins=len(proteins),
        residues=residues,
        sequences_sha256=sha256_residues(p.text for p in proteins),
        dtype=str(turbo.model.dtype).removeprefix("torch."),
        device=turbo.model.device.type,
        presets={name: figures_of(comparison) for name, comparison in loo.turbo_frozen.items()},
        new_residues=_NEW_RESIDUES,
        freezing={w: figures_of(one.frozen_full) for (_, w), one in ends.items() if len(one.frozen_full)},
        eight_bits=None if precision is None else choose_products(turbo, proteins),
    )


def beside_shipped(own: Sequence[ProteinRecord], has_families: bool = False) -> list[ProteinRecord]:
    """A user's proteins and the shipped evaluation proteins, or joined families, in turn."""
    shipped = join_families(read_fasta_strict(evaluation_families())) if has_families else None
    pairs = zip_longest(own, shipped or read_fasta_strict(evaluation_proteins()))
    return [record for pair in pairs for record in pair if record is not None]


def _measured(held_out: Sequence[ProteinRecord], records: Sequence[ProteinRecord]) -> list[Protein]:
    """The first proteins, up to the residues to measure, without those that are or hold a part of the calibration.

    Of families, neither the protein nor a homolog may.
    """
    calibrated = [one for record in records for one in record.sequence.split(SEPARATOR)]
    known = "\n".join(calibrated)
    left = max(_FEWEST_MEASURED, sum(len(record.sequence) for record in records) // _CALIBRATED_PER_MEASURED)
    chosen: list[Protein] = []
    for record in held_out:
        own = record.sequence.split(SEPARATOR)
        if any(one in known or any(part in one for part in calibrated) for one in own):
            continue
        protein = Protein.of(record.id, record.sequence)
        left -= len(protein)
        if chosen and left < 0:
            break
        chosen.append(protein)
    return chosen


@contextmanager
def _calibrated(turbo: ContextModel, calibration: Calibration) -> Iterator[None]:
    """The model with this calibration; then with its own."""
    encoder = turbo.model.base_model
    options = {"preset": encoder.turbo_config, "backend": encoder.backend}
    before, chosen = encoder.calibration, encoder.preset_chosen
    encoder.set_turbo(calibration=calibration, **options)
    try:
        yield
    finally:
        encoder.set_turbo(calibration=before, **options)
        encoder.preset_chosen = chosen
