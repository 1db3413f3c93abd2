"""The test protocol of exact contexts: every residue of a protein masked, after homologs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.config import TurboConfig
from esm_turbo.evaluate.contexts import prefill, to_float64
from esm_turbo.evaluate.metrics import Outputs
from esm_turbo.evaluate.protocols import Advance, Arms, Protein
from esm_turbo.tasks.common.forwards import FROZEN

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

IntArray = npt.NDArray[np.int64]

# One residue in this many is masked at a time, about as often as in training.
MASKED_APART = 7


def masked_rows(sequence: str, symbol: str) -> list[str]:
    """A protein with every seventh residue masked, from the first, the second, ... on: each but X is masked once."""
    known = [index for index, residue in enumerate(sequence) if residue != "X"]
    rows = []
    for first in range(min(MASKED_APART, len(known))):
        masked = set(known[first::MASKED_APART])
        rows.append("".join(symbol if index in masked else residue for index, residue in enumerate(sequence)))
    return rows


@torch.no_grad()
def after_homologs(
    turbo: ContextModel, proteins: Sequence[Protein], configs: Mapping[str, TurboConfig], advance: Advance
) -> Arms:
    """Predict every residue of proteins, masked, after their homologs.

    Such contexts are exact: frozen and full agree up to rounding, and compression is the only error.

    Args:
        turbo: the model with its calibration.
        proteins: with homologs.
        configs: the presets by name.
        advance: called with 1 after every protein.

    Raises:
        ValueError: a protein has no residue but X, or a homolog is invalid, see `encode_homologs`.
    """
    arms = Arms.of(configs, "after homologs")
    codes, model = turbo.codes, turbo.model
    for protein in proteins:
        context = protein.context_ids(turbo)
        rows = masked_rows(protein.sequence, codes.mask_symbol)
        if not rows:
            raise ValueError(f"{protein.name}: holds no residue but X")
        queries = [codes.whole(codes.encode(row, protein.name)) for row in rows]
        # X is left out, and its position kept.
        width = len(codes.present(queries)[0][0])
        present, places = codes.present([context])
        positions = None if places is None else codes.batch(places)[0]
        _, caches = prefill(model, [FROZEN, *configs.values()], *codes.batch(present), positions)
        residues = np.arange(width - codes.around)
        # `<bos>` and `<eos>` of the first row, and the masked residues between.
        of_row = np.concatenate([[0], residues % MASKED_APART, [0]])
        column = np.concatenate([[0], residues + len(codes.before), [width - 1]])

        whole, at = codes.present([[*context, *query] for query in queries])
        ids, mask = (x.to(model.device) for x in codes.batch(whole))
        found = model(ids, mask, None if at is None else codes.batch(at)[0].to(model.device), output_hidden_states=True)
        last = ids.shape[1] - width + column
        full = _outputs(found.hidden_states[-1], found.logits, of_row, last)
        of = {}
        for config, cache in caches.items():
            extended = turbo.extend(cache, rows)
            of[config] = _outputs(extended.hidden_states, extended.logits, of_row, column)
        frozen, compressed = of[FROZEN], [(name, of[config]) for name, config in configs.items()]
        arms.add(protein, full, frozen, compressed, np.isin(column, (0, width - 1)))
        advance(1)
    return arms


def _outputs(states: Tensor, logits: Tensor, row: IntArray, column: IntArray) -> Outputs:
    return Outputs(to_float64(states)[row, column], to_float64(logits)[row, column])
