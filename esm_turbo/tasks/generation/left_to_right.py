"""Residue after residue to the right of a prefix, over a cache that grows with them.

ESM-2 is a masked model: it has no prediction for the next residue. What is asked is what it would put in place of a
`<mask>` after the last one, and `<eos>` is left out, since the protein does not end there.

A step runs the residue that was drawn last, whose keys and values are then stored, and a `<mask>` behind it, whose are
not. What is stored of a residue was computed when the residues to its right did not exist. So every few steps the
last residues are taken off the cache and run once more, together, and stored anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache


class LeftToRight:
    """A batch that grows by a residue a row and step.

    Args:
        turbo: the model.
        cache: contexts without `<eos>`, one for each row; it is changed.
        refresh: residues at the end of each row that a refresh runs anew; as many as a row has tokens compute it as a
            whole.
        refresh_every: steps from one refresh to the next; the first step has one.
    """

    def __init__(self, turbo: ContextModel, cache: TurboKVCache, refresh: int, refresh_every: int) -> None:
        self.turbo = turbo
        self.cache = cache
        self.refresh = refresh
        self.refresh_every = refresh_every
        self.steps = 0
        # What the cache knows too, kept where it can be read without waiting for a device.
        self.stored: list[int] = cache.lengths.tolist()
        self.token_ids = _rows(cache.token_ids, self.stored)
        self.next_positions: list[int] = cache.next_positions.tolist()
        self.positions = None if cache.positions is None else _rows(cache.positions, self.stored)

    def push(self, token_ids: list[int]) -> None:
        """Adds a token to every row; it is stored at the next step."""
        for row, token in enumerate(token_ids):
            self.token_ids[row].append(token)
            if self.positions is not None:
                self.positions[row].append(self.next_positions[row])
            self.next_positions[row] += 1

    def logits(self) -> Tensor:
        """What the model predicts for each row's next token, [rows, vocab_size]."""
        logits = self._step(masks=1)
        self.steps += 1
        return logits

    def finish(self) -> TurboKVCache:
        """Stores what is not stored yet, with a refresh where one is due, and returns the cache."""
        if self.stored[0] < len(self.token_ids[0]):
            self._step(masks=0)
        return self.cache

    @torch.no_grad()
    def _step(self, masks: int) -> Tensor:
        if self.steps % self.refresh_every == 0:
            self._forget_tail()
        codes = self.turbo.codes
        new = [[*ids[begin:], *[codes.mask] * masks] for ids, begin in zip(self.token_ids, self.stored, strict=True)]
        input_ids, mask = codes.batch(new)
        counts = mask.sum(1)
        steps = torch.arange(input_ids.shape[1])
        device = self.turbo.model.device
        output = self.turbo.model(
            input_ids.to(device),
            mask.to(device),
            self._position_ids(new),
            past_key_values=self.cache,
            use_cache=True,
            append_mask=(steps < (counts - masks)[:, None]).to(device),
        )
        self.stored = [len(ids) for ids in self.token_ids]
        # A prefill stores the masks as well; and on a device the cache itself does not know how long its rows are.
        self._crop()
        logits: Tensor = output.logits[torch.arange(len(new)), counts - 1]
        return logits

    def _forget_tail(self) -> None:
        """Takes the residues of a refresh off the cache."""
        stored = [min(n, max(len(ids) - self.refresh, 0)) for n, ids in zip(self.stored, self.token_ids, strict=True)]
        if stored == self.stored:
            return
        self.stored = stored
        if any(stored):
            self._crop()
        else:
            self.cache.reset()

    def _position_ids(self, new: list[list[int]]) -> Tensor | None:
        """Positions of the new tokens where they are not simply the next ones."""
        if self.positions is None:
            return None
        rows = [
            [*places[begin:], after][: len(ids)]
            for ids, places, begin, after in zip(new, self.positions, self.stored, self.next_positions, strict=True)
        ]
        return self.turbo.codes.batch(rows)[0].to(self.turbo.model.device)

    def _crop(self) -> None:
        if len(set(self.stored)) > 1:
            self.cache.crop(torch.tensor(self.stored))
        self.cache.crop(max(self.stored))


def _rows(x: Tensor, lengths: list[int]) -> list[list[int]]:
    return [row[:n] for row, n in zip(x.tolist(), lengths, strict=True)]
