"""Cost of calibration: time compared with plain forward passes, and memory by number of proteins."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import EsmForMaskedLM, EsmTokenizer

from benchmarks.harness.embedded import plain_model
from benchmarks.harness.measure import (
    Case,
    Check,
    Figures,
    Target,
    in_process,
    interleave,
    peak_resident,
    ratio,
    spread,
    worst,
)
from benchmarks.harness.models import random_tokens
from esm_turbo import KVCalibrator
from esm_turbo.assets import EMBEDDED_MODEL, calibration_proteins
from esm_turbo.codecs.fitting.statistics import Array
from esm_turbo.files.families import FAMILIES
from esm_turbo.proteins.fasta import read_fasta_strict, token_batches
from esm_turbo.proteins.tokens import TokenCodes

Batch = tuple[Tensor, Tensor]
_MODULE = "benchmarks.speed.calibration"
_TOLERANCE = 1e-4
_BATCH_OF_RANDOM = 8


def time_cases(proteins: int, toks_per_batch: Sequence[int]) -> Iterator[Case]:
    """`partial_fit` and plain forward passes of the encoder, by batch size.

    Args:
        proteins: number of shipped proteins, evenly spaced in the file.
        toks_per_batch: padded tokens per batch; 0 for one protein per batch.
    """
    model = plain_model()
    for budget in toks_per_batch:
        batches = _shipped_batches(proteins, max(budget, 1))

        def check(batches: Sequence[Batch] = batches) -> Check:
            calibrator = KVCalibrator(model)
            for ids, mask in batches:
                calibrator.partial_fit(ids, mask)
            found = calibrator.finalize(["exact"]).statistics.residues.values
            mean, covariance = _value_moments(model, batches)
            size = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))[..., None]
            errors = (
                float(np.abs((found.mean - mean) / size[..., 0]).max()),
                float(np.abs((found.covariance - covariance) / (size * size.swapaxes(-1, -2))).max()),
            )
            what = "means and covariances of the residues' values against float64, in standard deviations"
            return Check(what, worst(errors), _TOLERANCE)

        def measure(repeats: int, batches: Sequence[Batch] = batches) -> Figures:
            calibrator = KVCalibrator(model)
            forward = torch.no_grad()(model.esm)
            arms = {
                "forward": [functools.partial(forward, *batch) for batch in batches],
                "partial_fit": [functools.partial(calibrator.partial_fit, *batch) for batch in batches],
            }
            seconds = spread(interleave(arms, repeats))
            return {"seconds": seconds, "ratios": {"partial_fit / forward": ratio(seconds, "partial_fit", "forward")}}

        yield Case(
            name=f"time, {f'batches of {budget} tokens' if budget else 'one protein a batch'}",
            model=EMBEDDED_MODEL.name,
            shape={
                "proteins": proteins,
                "toks_per_batch": budget,
                "batches": len(batches),
                "tokens": int(sum(mask.sum() for _, mask in batches)),
                "dtype": "float32",
            },
            check=check,
            measure=measure,
            targets=[Target(("ratios", "partial_fit / forward"), at_most=1.4)],
        )


def memory_cases(proteins: Sequence[int], residues: int) -> Iterator[Case]:
    """Peak physical memory of processes that calibrate on random proteins, all codecs fitted."""
    fewest, most = min(proteins), max(proteins)
    found: dict[int, Figures] = {}

    def check() -> Check:
        missing = 0
        for n in proteins:
            found[n] = in_process(_MODULE, n, residues)
            missing += abs(found[n]["sequences"] - n)
        return Check("proteins that the calibrator has not seen", missing, 0)

    def measure(repeats: int) -> Figures:
        peaks = {str(n): found[n]["bytes"] for n in proteins}
        growth = {stage: peaks[str(most)][stage] / peaks[str(fewest)][stage] for stage in ("partial_fit", "finalize")}
        return {"bytes": peaks, "growth": growth}

    yield Case(
        name=f"memory, {' and '.join(map(str, proteins))} proteins",
        model=EMBEDDED_MODEL.name,
        shape={"proteins": list(proteins), "residues": residues, "batch_size": _BATCH_OF_RANDOM, "dtype": "float32"},
        check=check,
        measure=measure,
        targets=[Target(("growth", stage), at_most=1.1) for stage in ("partial_fit", "finalize")],
    )


def _shipped_batches(proteins: int, toks_per_batch: int) -> list[Batch]:
    records = read_fasta_strict(calibration_proteins())
    codes = TokenCodes.of(EsmTokenizer.from_pretrained(EMBEDDED_MODEL), FAMILIES["esm"])
    chosen = records[:: max(1, len(records) // proteins)][:proteins]
    rows = [[codes.cls, *codes.encode(record.sequence, record.id), codes.eos] for record in chosen]
    batches = token_batches([len(row) for row in rows], toks_per_batch)
    return [codes.batch([rows[index] for index in batch]) for batch in batches]


def _value_moments(model: EsmForMaskedLM, batches: Sequence[Batch]) -> tuple[Array, Array]:
    """Mean and covariance of the values of every head over residues, [layers, heads, ...], from the plain model."""
    layers = [layer.attention.self for layer in model.esm.encoder.layer]
    seen: list[list[Array]] = [[] for _ in layers]
    residues: list[Tensor] = []

    def keep(index: int, output: Tensor) -> None:
        rows = output[residues[-1]]
        heads = rows.view(len(rows), layers[index].num_attention_heads, -1)
        seen[index].append(heads.transpose(0, 1).double().numpy())

    hooks = [
        layer.value.register_forward_hook(lambda module, inputs, output, index=index: keep(index, output))
        for index, layer in enumerate(layers)
    ]
    try:
        for ids, mask in batches:
            residues.append((mask != 0) & (ids != 0) & (ids != model.config.eos_token_id))
            with torch.no_grad():
                model.esm(ids, mask)
    finally:
        for hook in hooks:
            hook.remove()
    values = np.stack([np.concatenate(parts, axis=1) for parts in seen])
    mean = values.mean(axis=2)
    centred = values - mean[:, :, None]
    return mean, np.einsum("lhti,lhtj->lhij", centred, centred, optimize=True) / values.shape[2]


def main() -> None:
    """Calibrate and print the peak memory of this process; run by `memory_cases`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("proteins", type=int)
    parser.add_argument("residues", type=int)
    options = parser.parse_args()
    calibrator = KVCalibrator(plain_model())
    peaks = {"loaded": peak_resident()}
    for first in range(0, options.proteins, _BATCH_OF_RANDOM):
        rows = min(_BATCH_OF_RANDOM, options.proteins - first)
        calibrator.partial_fit(random_tokens(rows, options.residues, eos=True, seed=first))
    peaks["partial_fit"] = peak_resident()
    calibrator.finalize()
    peaks["finalize"] = peak_resident()
    print(json.dumps({"sequences": calibrator.n_sequences_seen_, "bytes": peaks}))


if __name__ == "__main__":
    main()
