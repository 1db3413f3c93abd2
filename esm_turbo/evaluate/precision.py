"""The error of a model's precision: whole forwards of the same weights in two precisions, and which products to choose.

It is the third error of a result, beside those of freezing and of compression.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from esm_turbo.evaluate.contexts import as_outputs, prefill
from esm_turbo.evaluate.metrics import Outputs
from esm_turbo.evaluate.protocols import Comparison, Protein
from esm_turbo.files.quality import EightBits, Figures
from esm_turbo.model.precision import Product, all_products, in_eight_bits

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

MOST_KL = 3e-4
"""Divergence that eight-bit products may cost in the mean, nats.

Freezing with eight residues refreshed costs more on domains, by the small models, and less on long proteins.
"""


def choose_products(turbo: ContextModel, proteins: Sequence[Protein], most_kl: float = MOST_KL) -> EightBits:
    """Measure eight-bit products, and choose those that together cost little.

    Errors of single products add up. If all of them cost more than `most_kl`, those are kept as they are that cost
    most for their number of weights, which is what their time goes by.

    Args:
        turbo: a model in bfloat16, which is not changed.
        proteins: to measure on.
        most_kl: mean divergence over residues, nats.

    Raises:
        ValueError: the model cannot have eight-bit products, or outputs contain NaN or infinity.
    """
    products, expected = all_products(turbo.model), whole_forwards(turbo, proteins)

    def measure(chosen: Collection[Product]) -> Figures:
        with in_eight_bits(turbo.model, chosen):
            return figures_of(compare_forwards(turbo, proteins, expected, whole_forwards(turbo, proteins)))

    figures = every = measure(products)
    if every.kl_mean <= most_kl:
        return EightBits(every, every, ())
    alone = {product: measure([product]).kl_mean for product in products}
    chosen = sorted(products, key=lambda product: alone[product] / _weights(turbo, product))
    while chosen and figures.kl_mean > most_kl:
        excess = figures.kl_mean - most_kl
        while chosen and excess > 0:
            excess -= alone[chosen.pop()]
        figures = measure(chosen)
    return EightBits(every, figures, tuple(sorted(set(products) - set(chosen))))


def _weights(turbo: ContextModel, product: Product) -> int:
    layer, name = product
    return sum(linear.weight.numel() for linear in turbo.model.base_model.products[layer][name])


@torch.no_grad()
def whole_forwards(turbo: ContextModel, proteins: Sequence[Protein]) -> list[Outputs]:
    """The outputs of every protein's tokens by a whole forward, after its homologs if it has any."""
    codes, found = turbo.codes, []
    for protein in proteins:
        own, context = protein.token_ids(codes), protein.context_ids(turbo)
        rows, places = codes.present([[*context, *own], own])
        ids = torch.tensor(rows[:1])
        positions = None if places is None else torch.tensor(places[:1])
        output, _ = prefill(turbo.model, [], ids, torch.ones_like(ids), positions)
        found.append(as_outputs(output, 0, slice(-len(rows[1]), None)))
    return found


def compare_forwards(
    turbo: ContextModel, proteins: Sequence[Protein], expected: Sequence[Outputs], found: Sequence[Outputs]
) -> Comparison:
    """Compare whole forwards of proteins, see `whole_forwards`.

    Raises:
        ValueError: outputs contain NaN or infinity.
    """
    comparison, codes = Comparison("whole forwards in two precisions"), turbo.codes
    for protein, before, after in zip(proteins, expected, found, strict=True):
        [own], _ = codes.present([protein.token_ids(codes)])
        special = np.isin(own, [*codes.before, *codes.after])
        comparison.add(protein, before, after, special)
    return comparison


def figures_of(comparison: Comparison) -> Figures:
    """Figures of the residues."""
    accuracy = comparison.residues.accuracy()
    return Figures(**{name: getattr(accuracy, name) for name in Figures.__dataclass_fields__})
