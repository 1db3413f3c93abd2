"""The demo: calibrate, prefill, extend and compare, on shipped proteins with the embedded model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.assets import EMBEDDED_MODEL, calibration_proteins, evaluation_proteins
from esm_turbo.config import DEFAULT_REFRESH, PRODUCT_PRESETS
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta_strict
from esm_turbo.tasks.calibration.records import calibrate_records
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.turbo_esm import TurboEsm

if TYPE_CHECKING:
    from esm_turbo.evaluate import Evaluation

CALIBRATION_PROTEINS = 60
EVALUATION_PROTEINS = 6
NEW_RESIDUES = 8
_EVALUATION_LENGTHS = range(60, 161)


def run_demo(device: str | None = None, progress: Progress | None = None) -> tuple[dict[str, Any], Evaluation]:
    """Run the demo. It writes nothing and needs no network.

    Args:
        device: of the model; None as for `TurboEsm.from_pretrained`.
        progress: called in every stage, see `Progress`.

    Returns:
        The results as JSON values, and the evaluation among them as an object.
    """
    clock = _Clock()
    # Without the shipped calibration: the demo makes its own.
    turbo = TurboEsm.from_pretrained(EMBEDDED_MODEL, calibration=False, device=device)
    clock.lap("load")
    fasta = calibration_proteins()
    records = read_fasta_strict(fasta)[:CALIBRATION_PROTEINS]
    calibration = calibrate_records(turbo, records, source=fasta, presets=PRODUCT_PRESETS, progress=progress)
    turbo.model.set_turbo(calibration=calibration)
    clock.lap("calibrate")
    unseen = [r for r in read_fasta_strict(evaluation_proteins()) if len(r.sequence) in _EVALUATION_LENGTHS]
    example = _example(turbo, unseen[0])
    clock.lap("prefill and extend")
    chosen = unseen[:: max(1, len(unseen) // EVALUATION_PROTEINS)][:EVALUATION_PROTEINS]
    evaluation = turbo.evaluate(
        [r.sequence for r in chosen],
        list(PRODUCT_PRESETS),
        names=[r.id for r in chosen],
        extend_ks=(NEW_RESIDUES,),
        refresh_ws=(0, DEFAULT_REFRESH),
        progress=progress,
    )
    clock.lap("compare")
    result = {
        "calibration": {"proteins": len(records), "residues": sum(len(r.sequence) for r in records)},
        "example": example,
        "evaluation": evaluation.to_dict(),
        "seconds": clock.laps,
    }
    return result, evaluation


@torch.no_grad()
def _example(turbo: TurboEsm, record: ProteinRecord) -> dict[str, Any]:
    """Extend a cache of a protein by its last residues, and compare them with the exact run."""
    context, new = record.sequence[:-NEW_RESIDUES], record.sequence[-NEW_RESIDUES:]
    cache = turbo.prefill(context)
    extended = turbo.extend(cache, new, refresh=DEFAULT_REFRESH)
    codes = turbo.codes
    input_ids = torch.tensor([[codes.cls, *codes.encode(record.sequence, record.id), codes.eos]])
    exact = turbo.model(input_ids.to(turbo.model.device), output_hidden_states=True)
    new_tokens = slice(-NEW_RESIDUES - 1, -1)
    cosines = torch.cosine_similarity(
        extended.hidden_states[0, :NEW_RESIDUES].float(), exact.hidden_states[-1][0, new_tokens].float(), dim=-1
    )
    same = extended.logits[0, :NEW_RESIDUES].argmax(-1) == exact.logits[0, new_tokens].argmax(-1)
    return {
        "protein": record.id,
        "context": len(context),
        "new": len(new),
        "preset": cache.config.name,
        "nbytes": cache.nbytes,
        "cosine": float(cosines.mean()),
        "top1": int(same.sum()),
    }


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = round(now - self._last, 2), now
