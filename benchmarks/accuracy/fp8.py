"""What eight-bit products cost: whole forwards with no product or all in eight bits against float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch

from benchmarks.harness.embedded import SMALL_MODELS, evaluation_set, rounded, small_model
from benchmarks.harness.measure import Case, Check, Figures, Target
from esm_turbo import TurboEsm
from esm_turbo.evaluate.precision import MOST_KL, compare_forwards, figures_of, whole_forwards
from esm_turbo.evaluate.protocols import Protein
from esm_turbo.model.precision import PRODUCTS, all_products, in_eight_bits

MODELS = ("esm2-mini", "esmc-mini")
_DOMAINS = 30


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One row of each model.

    Args:
        max_proteins: at most so many of the 30 domains.
    """
    for model in MODELS:
        shape = {"dtype": "bfloat16", "max_proteins": max_proteins}
        targets = [Target(("shares", "all", "kl_mean"), at_most=MOST_KL)]
        measure = partial(_measure, model, max_proteins)
        yield Case(f"fp8 {model}", model, shape, partial(_check, model), measure, targets)


def _half(model: str) -> TurboEsm:
    return TurboEsm.from_pretrained(SMALL_MODELS[model], device="cpu", dtype=torch.bfloat16)


def _proteins(max_proteins: int | None) -> list[Protein]:
    records = evaluation_set("cath_val200", min(_DOMAINS, max_proteins or _DOMAINS))
    return [Protein.of(record.id, record.sequence) for record in records]


def _check(model: str) -> Check:
    """Errors of single products add up, which choosing among them supposes."""
    turbo, proteins = _half(model), _proteins(2)
    expected = whole_forwards(turbo, proteins)

    def divergence(names: tuple[str, ...]) -> float:
        with in_eight_bits(turbo.model, [product for product in all_products(turbo.model) if product[1] in names]):
            found = whole_forwards(turbo, proteins)
        return figures_of(compare_forwards(turbo, proteins, expected, found)).kl_mean

    whole, parts = divergence(PRODUCTS), sum(divergence((name,)) for name in PRODUCTS)
    return Check("divergence of all products against the sum of each alone, relative", abs(whole / parts - 1), 0.5)


def _measure(model: str, max_proteins: int | None, repeats: int) -> Figures:
    turbo, proteins = _half(model), _proteins(max_proteins)
    exact, shares = whole_forwards(small_model(model), proteins), {}
    for share, products in {"none": [], "all": all_products(turbo.model)}.items():
        with in_eight_bits(turbo.model, products):
            found = whole_forwards(turbo, proteins)
        shares[share] = asdict(figures_of(compare_forwards(turbo, proteins, exact, found)))
    return rounded({"proteins": len(proteins), "residues": sum(map(len, proteins)), "shares": shares})
