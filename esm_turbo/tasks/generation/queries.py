"""Proteins that are run whole in each step, alone or after homologs: of families with exact contexts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esm_turbo.tasks.generation.unmasking import MaskedBatch

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache


class QueryBatch(MaskedBatch):
    """Proteins of which some columns change, and contexts that each of them is read after.

    Args:
        turbo: the model.
        rows: token ids of the residues of each protein.
        positions: of each protein that change, counted from 1.
        caches: contexts, one row each; of several, log-probabilities are averaged. None for the proteins alone.
    """

    def __init__(
        self,
        turbo: ContextModel,
        rows: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        caches: Sequence[TurboKVCache],
    ) -> None:
        # With one token in column 0, a residue's column is its position.
        last = turbo.codes.before[-1]
        super().__init__(turbo, [[last, *row, *turbo.codes.after] for row in rows], positions, 0, 1)
        self.caches = caches

    @torch.no_grad()
    def logits(self) -> list[Tensor]:
        """See `MaskedBatch.logits`."""
        first = self.turbo.codes.before[:-1]
        ids, mask = self.turbo.codes.batch([[*first, *row] for row in self.rows])
        self.steps, self.ran = self.steps + 1, ids.numel() * max(1, len(self.caches))
        sizes = list(map(len, self.chosen))
        rows = [row for row, size in enumerate(sizes) for _ in range(size)]
        columns = [len(first) + column for column in chain.from_iterable(self.chosen)]
        ids, mask = (x.to(self.turbo.model.device) for x in (ids, mask))
        found = []
        for cache in self.caches or (None,):
            options = {} if cache is None else {"past_key_values": cache}
            states = self.turbo.model.base_model(ids, mask, **options).last_hidden_state
            found.append(self.turbo.model.lm_head(states[rows, columns]).float())
        logits = found[0] if len(found) == 1 else torch.stack([one.log_softmax(-1) for one in found]).mean(dim=0)
        return list(logits.cpu().split(sizes))
