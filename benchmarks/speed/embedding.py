"""Embedding many proteins, compared with plain loops over Hugging Face's model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EsmForMaskedLM, EsmModel, EsmTokenizer

from benchmarks.harness.embedded import plain_model, shipped_proteins
from benchmarks.harness.environment import device_name
from benchmarks.harness.measure import Case, Check, Figures, Target, interleave, ratio, spread, worst
from benchmarks.harness.models import Architecture, masked_lm, turbo_of
from benchmarks.harness.names import EMBED, FILE_ORDER, SAME_BATCHES
from esm_turbo import Calibration, TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.proteins.fasta import ProteinRecord, token_batches
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.records import embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest

TOKS_PER_BATCH = 4096
DEFAULT_BATCH = 8
"""Proteins per batch in the simplest loop."""

_INCLUDE = ("mean", "per_tok")
# Hidden states after the last layer norm are of size one; float32 sums in another order, bfloat16 has eight bits.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
Result = list[tuple[Tensor, Tensor]]
"""Hidden states of the residues [L, hidden_size] and their mean per protein, float32 on the CPU."""


def embedded_cases(proteins: int) -> Iterator[Case]:
    """The embedded model, on the CPU."""
    model = plain_model()
    yield _case(EMBEDDED_MODEL.name, model, shipped_proteins()[:proteins])


def random_cases(
    architecture: Architecture,
    proteins: int,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> Iterator[Case]:
    """Random weights in the geometry of a larger model; no cases without the device."""
    if device == "cuda" and not torch.cuda.is_available():
        return
    for dtype in dtypes:
        model = masked_lm(architecture, device).to(dtype)
        yield _case(architecture.name, model, shipped_proteins()[:proteins])


def output_cases(proteins: int) -> Iterator[Case]:
    """Cost of writing files and caches, embedded model on the CPU."""
    model = plain_model()
    turbo = turbo_of(model, Calibration.load(EMBEDDED_MODEL), "turbo3")
    records = shipped_proteins()[:proteins]
    sequences = [record.sequence for record in records]
    arms = {
        "in memory": partial(turbo.embed, sequences, include=_INCLUDE, toks_per_batch=TOKS_PER_BATCH),
        "in memory, with caches": partial(
            turbo.embed, sequences, include=[*_INCLUDE, "cache"], toks_per_batch=TOKS_PER_BATCH
        ),
        ".pt files": partial(_to_files, turbo, records, "pt"),
        "safetensors files": partial(_to_files, turbo, records, "safetensors"),
        "one HDF5 file": partial(_to_files, turbo, records, "h5"),
    }

    def measure(repeats: int) -> Figures:
        seconds = spread(interleave({name: [arm] for name, arm in arms.items()}, repeats))
        ratios = {f"{name} / in memory": ratio(seconds, name, "in memory") for name in arms if name != "in memory"}
        return {"seconds": seconds, "ratios": ratios}

    yield Case(
        name=EMBEDDED_MODEL.name,
        model=EMBEDDED_MODEL.name,
        shape=_shape(model, records),
        check=lambda: _check(_ours(turbo, sequences), _plain(model, *_batched(sequences, model, same=True))),
        measure=measure,
    )


def _case(name: str, model: EsmForMaskedLM, records: Sequence[ProteinRecord]) -> Case:
    turbo = turbo_of(model)
    sequences = [record.sequence for record in records]
    device, dtype = model.device, next(model.parameters()).dtype
    # Tokenised before the clock starts: not counted in the plain loops, but counted in ours.
    same, default = (_batched(sequences, model, same=same) for same in (True, False))
    arms: dict[str, list[Callable[[], object]]] = {
        SAME_BATCHES: [partial(_plain, model, *same)],
        FILE_ORDER: [partial(_plain, model, *default)],
        EMBED: [partial(_ours, turbo, sequences)],
    }
    residues = sum(map(len, sequences))

    def check() -> Check:
        ours = _ours(turbo, sequences)
        checks = [_check(ours, _plain(model, *batches), _TOLERANCE[dtype]) for batches in (same, default)]
        return Check(checks[0].what, worst(check.error for check in checks), _TOLERANCE[dtype])

    def measure(repeats: int) -> Figures:
        seconds = spread(interleave(arms, repeats))
        return {
            "seconds": seconds,
            "residues_per_second": {arm: residues / seconds[arm]["p50"] for arm in arms},
            "ratios": {
                f"{EMBED} / {SAME_BATCHES}": ratio(seconds, EMBED, SAME_BATCHES),
                f"{FILE_ORDER} / {EMBED}": ratio(seconds, FILE_ORDER, EMBED),
            },
        }

    return Case(
        name=f"{name}, {str(dtype).removeprefix('torch.')}, {device.type}",
        model=name,
        shape=_shape(model, records) | {"device_name": device_name(device)},
        check=check,
        measure=measure,
        targets=[
            Target(("ratios", f"{EMBED} / {SAME_BATCHES}"), at_most=1.05),
            Target(("ratios", f"{FILE_ORDER} / {EMBED}"), at_least=1.0),
        ],
    )


def _shape(model: EsmForMaskedLM, records: Sequence[ProteinRecord]) -> dict[str, Any]:
    return {
        "proteins": len(records),
        "residues": sum(len(record.sequence) for record in records),
        "longest": max(len(record.sequence) for record in records),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "toks_per_batch": TOKS_PER_BATCH,
        "include": list(_INCLUDE),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": model.device.type,
    }


def _ours(turbo: TurboEsm, sequences: Sequence[str]) -> Result:
    last = turbo.model.config.num_hidden_layers
    return [
        (embedding.representations[last], embedding.mean_representations[last])
        for embedding in turbo.embed(sequences, include=_INCLUDE, toks_per_batch=TOKS_PER_BATCH)
        if embedding.representations is not None and embedding.mean_representations is not None
    ]


def _batched(
    sequences: Sequence[str], model: EsmForMaskedLM, *, same: bool
) -> tuple[list[list[int]], list[tuple[Tensor, Tensor]]]:
    """Indices and tokens of batches: by token budget, longest first, or in the order of the file."""
    tokenizer = EsmTokenizer.from_pretrained(EMBEDDED_MODEL)
    if same:
        batches = token_batches([len(sequence) + 2 for sequence in sequences], TOKS_PER_BATCH)[::-1]
    else:
        indices = list(range(len(sequences)))
        batches = [indices[begin : begin + DEFAULT_BATCH] for begin in range(0, len(indices), DEFAULT_BATCH)]
    tokens = []
    for batch in batches:
        encoded = tokenizer([sequences[index] for index in batch], padding=True, return_tensors="pt")
        tokens.append((encoded.input_ids, encoded.attention_mask))
    return batches, tokens


@torch.no_grad()
def _plain(model: EsmForMaskedLM, batches: Sequence[Sequence[int]], tokens: Sequence[tuple[Tensor, Tensor]]) -> Result:
    """A plain loop: one forward pass per batch, then the rows of each protein."""
    encoder: EsmModel = model.esm
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for batch, (input_ids, attention_mask) in zip(batches, tokens, strict=True):
        states = encoder(input_ids.to(model.device), attention_mask.to(model.device)).last_hidden_state
        # One copy per batch: a copy per protein would wait for the device each time.
        states = states.float().cpu()
        for index, own, n in zip(batch, states, attention_mask.sum(1).tolist(), strict=True):
            residues = own[1 : n - 1].clone()
            found[index] = residues, residues.mean(0)
    return [found[index] for index in range(len(found))]


def _check(ours: Result, plain: Result, tolerance: float = _TOLERANCE[torch.float32]) -> Check:
    errors = [
        float((mine - theirs).abs().max())
        for protein, other in zip(ours, plain, strict=True)
        for mine, theirs in zip(protein, other, strict=True)
    ]
    return Check("hidden states and means against the plain loops, largest difference", worst(errors), tolerance)


def _to_files(turbo: TurboEsm, records: Sequence[ProteinRecord], file_format: EmbeddingFormat) -> None:
    request = EmbeddingRequest.of(turbo, (-1,), _INCLUDE)
    with tempfile.TemporaryDirectory() as folder:
        run = embed_records(
            turbo, records, Path(folder) / "out", request, file_format=file_format, toks_per_batch=TOKS_PER_BATCH
        )
    if run.failed or run.reused:
        raise RuntimeError(f"not all proteins were embedded: {run}")
