"""Small trained models, the proteins that accuracy is measured on, and the check of every accuracy row."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from benchmarks.harness.measure import Check, worst
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL, calibration_proteins, evaluation_proteins
from esm_turbo.config import TurboConfig
from esm_turbo.evaluate import Evaluation, evaluate
from esm_turbo.evaluate.contexts import prefill
from esm_turbo.evaluate.protocols import extend_each_token
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta_strict
from esm_turbo.tasks.common.forwards import FROZEN

_MODELS = Path(__file__).resolve().parents[2] / "models"
SMALL_MODELS = {path.name: path for path in (EMBEDDED_MODEL, _MODELS / "esmc-mini", _MODELS / "e1-mini")}
"""A small trained model of every family: that of ESM-2 is in the package, the others are in models/."""

# Hidden states after the last layer norm are of size one.
_TOLERANCE = 1e-4
_DIGITS = 7


@functools.cache
def embedded() -> TurboEsm:
    """The embedded model with its shipped calibration, float32 on the CPU; one per process, read-only."""
    return TurboEsm.from_pretrained(device="cpu")


@functools.cache
def small_model(name: str) -> TurboEsm:
    """The small trained model of that name, see `SMALL_MODELS`, as `embedded`."""
    folder = SMALL_MODELS[name]
    return embedded() if folder == EMBEDDED_MODEL else TurboEsm.from_pretrained(folder, device="cpu")


@functools.cache
def plain_model(name: str = EMBEDDED_MODEL.name) -> Any:
    """Hugging Face's model with the weights of a small one, float32 on the CPU; one per process, read-only."""
    return AutoModelForMaskedLM.from_pretrained(SMALL_MODELS[name], dtype=torch.float32).eval()


def evaluation_set(name: str, max_proteins: int | None = None) -> list[ProteinRecord]:
    """The first proteins of an evaluation set, or all for None."""
    return read_fasta_strict(evaluation_proteins().with_name(f"{name}.fasta"))[:max_proteins]


@functools.cache
def shipped_proteins() -> tuple[ProteinRecord, ...]:
    """The shipped calibration proteins, in the order of their file."""
    return tuple(read_fasta_strict(calibration_proteins()))


def evaluated(
    turbo: TurboEsm, proteins: Sequence[ProteinRecord], presets: Mapping[str, TurboConfig], **options: Any
) -> Evaluation:
    """An evaluation of records by id and class, see `evaluate`."""
    return evaluate(
        turbo,
        [protein.sequence for protein in proteins],
        presets,
        names=[protein.id for protein in proteins],
        classes=[protein.structural_class for protein in proteins],
        **options,
    )


@torch.no_grad()
def exactness(protein: ProteinRecord, model: str = EMBEDDED_MODEL.name) -> Check:
    """Compare leave-one-out at full precision with Hugging Face's model on one protein: equal up to rounding."""
    turbo = small_model(model)
    ids = torch.tensor([[turbo.codes.cls, *turbo.codes.encode(protein.sequence, protein.id), turbo.codes.eos]])
    expected = plain_model(model)(ids, output_hidden_states=True)
    _, caches = prefill(turbo.model, [FROZEN], ids, torch.ones_like(ids))
    found = extend_each_token(turbo.model, caches[FROZEN], ids[0])
    pairs = ((found.hidden, expected.hidden_states[-1]), (found.logits, expected.logits))
    errors = [float(abs(ours - theirs[0].double().numpy()).max()) for ours, theirs in pairs]
    what = "leave-one-out at full precision against Hugging Face's model, hidden states and logits, largest difference"
    return Check(what, worst(errors), _TOLERANCE)


def rounded(figures: Any) -> Any:
    """Round all floats of a JSON value to seven digits, which exceeds the precision of any figure here."""
    if isinstance(figures, float):
        return float(f"{figures:.{_DIGITS}g}")
    if isinstance(figures, Mapping):
        return {name: rounded(value) for name, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [rounded(value) for value in figures]
    return figures
