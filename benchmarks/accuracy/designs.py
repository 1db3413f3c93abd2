"""Quality of designs by how their contexts were kept: pseudo-perplexity under the full model, with the same seeds.

A design is judged by Hugging Face's model, which recomputes everything with each new residue masked in turn. The arm
`full` draws from predictions recomputed in full at every step; the others as users do, with the default refreshes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.harness.embedded import embedded, evaluation_set, plain_model, rounded
from benchmarks.harness.measure import Case, Check, Figures, worst
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.tasks.generation.generate import GenerationOutput

_ARMS = {"full": "exact", "frozen": "exact", "turbo3": "turbo3", "turbo2": "turbo2", "turbo1": "turbo1"}
_NEW, _SAMPLES = 24, 2
_SET, _STRIDE, _PROTEINS, _SHORTEST = "cath_val200", 8, 12, 90
# Refreshes all of any protein.
_ALL = 10_000
# Logits are of the order of ten.
_TOLERANCE = 1e-3


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case of each kind of design.

    Args:
        max_proteins: use only the first N of the 12 proteins.
    """
    for name in ("to the right", "in place"):

        def measure(repeats: int, name: str = name) -> Figures:
            return rounded(_measure(name, _proteins(max_proteins)))

        shape = {"dtype": "float32", "max_proteins": max_proteins, "residues": _NEW, "samples": _SAMPLES}
        yield Case(name=f"designs {name}", model=EMBEDDED_MODEL.name, shape=shape, check=_check, measure=measure)


def _measure(name: str, given: Sequence[list[int]]) -> Figures:
    found = {arm: [_designs(name, arm, ids) for ids in given] for arm in _ARMS}
    quality = {arm: np.array([_quality(one) for one in own]) for arm, own in found.items()}
    return {
        "designs": name,
        "tested": len(given),
        "arms": {
            arm: {
                # Per protein, so that samples of one do not count as independent.
                "log_pseudo_perplexity": quality[arm].mean(axis=1).tolist(),
                "minus_full": (quality[arm] - quality["full"]).mean(axis=1).tolist(),
                "same_residue": float(np.mean([a == b for a, b in zip(_new(own), _new(found["full"]), strict=True)])),
            }
            for arm, own in found.items()
        },
    }


def _new(outputs: Sequence[GenerationOutput]) -> str:
    """The new residues of all designs."""
    return "".join(residues for one in outputs for residues in one.new_residues)


def _designs(name: str, arm: str, ids: list[int]) -> GenerationOutput:
    """Samples of one protein: 24 residues after its first three fifths, or in place of those in its middle."""
    turbo = _turbo_of(_ARMS[arm])
    options: dict[str, Any] = {"num_return_sequences": _SAMPLES, "seed": 1}
    options |= {"refresh": _ALL, "refresh_every": 1} if arm == "full" else {}
    sequence, middle = turbo.codes.decode(ids), len(ids) // 2
    if name == "to the right":
        return turbo.generate(sequence[: len(ids) * 3 // 5], max_new_tokens=_NEW, **options)
    return turbo.generate(sequence, positions=range(middle, middle + _NEW), **options)


@torch.no_grad()
def _quality(designs: GenerationOutput) -> list[float]:
    """Logarithm of each design's pseudo-perplexity: minus the mean log-probability of its new residues, nats."""
    codes, values = embedded().codes, []
    for sequence, positions in zip(designs.sequences, designs.positions, strict=True):
        ids, at = torch.tensor([codes.cls, *codes.encode(sequence, "a design"), codes.eos]), torch.tensor(positions)
        logits = plain_model()(ids.repeat(len(at), 1).scatter(1, at[:, None], codes.mask)).logits
        log_probs = logits[torch.arange(len(at)), at].double().log_softmax(-1)
        values.append(-float(log_probs.gather(1, ids[at][:, None]).mean()))
    return values


def _proteins(max_proteins: int | None) -> list[list[int]]:
    codes = embedded().codes
    long = [record for record in evaluation_set(_SET)[::_STRIDE] if len(record.sequence) >= _SHORTEST]
    return [codes.encode(record.sequence, record.id) for record in long[:_PROTEINS][:max_proteins]]


@functools.cache
def _turbo_of(preset: str) -> TurboEsm:
    return TurboEsm.from_pretrained(preset=preset, device="cpu")


@functools.cache
@torch.no_grad()
def _check() -> Check:
    """Compare steps to the right that refresh everything with Hugging Face's model."""
    turbo, ids = _turbo_of("exact"), _proteins(1)[0]
    errors = []
    for begin in (len(ids) * 3 // 5, len(ids) - 1):
        cache = turbo.prefill(turbo.codes.decode(ids[:begin]))
        found = turbo.extend(cache, turbo.codes.mask_symbol, refresh=_ALL).logits[0, 0]
        plain = plain_model()(torch.tensor([[turbo.codes.cls, *ids[:begin], turbo.codes.mask]])).logits[0, -1]
        errors.append(float((found - plain).abs().max()))
    what = "logits of the next residue with everything refreshed against Hugging Face's model, largest difference"
    return Check(what, worst(errors), _TOLERANCE)
