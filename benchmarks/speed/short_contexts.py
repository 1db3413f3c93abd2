"""Break-even of caching: candidates after contexts of several lengths, with and without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.measure import Case, Check, Figures, largest_difference, ratios, timed
from benchmarks.harness.models import random_sequences
from esm_turbo import TurboEsm

_WHAT = "logits by the backend torch against those by the slow backend reference, largest difference"
_TOLERANCE = 1e-4


def cases(residues: Sequence[int], candidates: int, candidate_residues: int, refresh: int) -> Iterator[Case]:
    """The embedded model with the default preset, on the CPU."""
    turbo, reference = (TurboEsm.from_pretrained(device="cpu", backend=backend) for backend in ("torch", "reference"))
    for n in residues:
        yield _case(turbo, reference, n, candidates, candidate_residues, refresh)


def _case(turbo: TurboEsm, reference: TurboEsm, residues: int, count: int, length: int, refresh: int) -> Case:
    context, *candidates = random_sequences([residues, *[length] * count])

    def check() -> Check:
        # Three suffice: the reference backend is slow.
        found, expected = (
            one.extend(one.prefill(context), candidates[:3], refresh=refresh).logits for one in (turbo, reference)
        )
        return Check(_WHAT, largest_difference(found, expected), _TOLERANCE)

    def measure(repeats: int) -> Figures:
        cache = turbo.prefill(context)
        arms = {
            "full": partial(_full, turbo, context, candidates),
            "turbo": partial(turbo.extend, cache, candidates, refresh=refresh),
            "prefill": partial(turbo.prefill, context),
        }
        seconds = timed(arms, repeats)
        saved = (seconds["full"]["p50"] - seconds["turbo"]["p50"]) / count
        return {
            "seconds": seconds,
            "ratios": ratios(seconds, ("full", "turbo")),
            # Number of candidates that pays for the prefill; None if there is no such number.
            "break_even_candidates": seconds["prefill"]["p50"] / saved if saved > 0 else None,
            "bytes": {"cache": cache.nbytes},
        }

    return Case(
        name=f"{residues} residues",
        model="esm2-mini",
        shape={
            "context_residues": residues,
            "candidates": count,
            "candidate_residues": length,
            "refresh": refresh,
            "preset": turbo.model.esm.turbo_config.name,
            "dtype": "float32",
        },
        check=check,
        measure=measure,
    )


@torch.no_grad()
def _full(turbo: TurboEsm, context: str, candidates: Sequence[str]) -> Tensor:
    codes = turbo.codes
    rows = [[codes.cls, *codes.encode(context + candidate, ""), codes.eos] for candidate in candidates]
    input_ids, attention_mask = codes.batch(rows)
    logits: Tensor = turbo.model(input_ids, attention_mask).logits
    return logits
