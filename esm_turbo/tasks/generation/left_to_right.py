"""Appending residues to a prefix, one per step, over a cache that grows with them.

ESM-2 is a masked model and has no prediction for the next residue. The prediction used here is the one for a `<mask>`
after the last residue, without `<eos>`, since the protein does not end there.

A step runs the residue drawn last, whose keys and values are then cached, and a `<mask>` after it, whose are not. The
keys and values of a residue were computed before the residues to its right existed. A refresh therefore drops the last
residues from the cache every few steps, and computes and caches them again, together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache


class LeftToRight:
    """A batch whose rows grow by one residue per step.

    Args:
        cache: contexts without `<eos>`, one per row; it is changed.
        refresh: number of tokens at the end of each row that a refresh computes again; a number of at least the row's
            tokens computes the whole row.
        refresh_every: steps from one refresh to the next; the first step has one.
    """

    def __init__(self, turbo: ContextModel, cache: TurboKVCache, refresh: int, refresh_every: int) -> None:
        self.turbo = turbo
        self.cache = cache
        self.refresh = refresh
        self.refresh_every = refresh_every
        self.steps = 0
        # Copies of the cache's own state on the host, which are read without waiting for a device.
        self.cached: list[int] = cache.lengths.tolist()
        self.token_ids = _rows(cache.token_ids, self.cached)
        self.next_positions: list[int] = cache.next_positions.tolist()
        self.positions = None if cache.positions is None else _rows(cache.positions, self.cached)

    def push(self, token_ids: list[int]) -> None:
        """Append a token to every row; the next step caches it."""
        for row, token in enumerate(token_ids):
            self.token_ids[row].append(token)
            if self.positions is not None:
                self.positions[row].append(self.next_positions[row])
            self.next_positions[row] += 1

    def logits(self) -> Tensor:
        """Predictions for the next token of each row, [rows, vocab_size]."""
        logits = self._step(masks=1)
        self.steps += 1
        return logits

    def finish(self) -> TurboKVCache:
        """Cache the tokens that are not cached yet, with a refresh if one is due, and return the cache."""
        if self.cached[0] < len(self.token_ids[0]):
            self._step(masks=0)
        return self.cache

    @torch.no_grad()
    def _step(self, masks: int) -> Tensor:
        """Run and cache the tokens that are not cached; return the logits of the last one or of a mask after it."""
        if self.steps % self.refresh_every == 0:
            self._drop_tail()
        codes = self.turbo.codes
        new = [[*ids[begin:], *[codes.mask] * masks] for ids, begin in zip(self.token_ids, self.cached, strict=True)]
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
        self.cached = [len(ids) for ids in self.token_ids]
        # A prefill caches the masks too; and on a device the cache keeps only an upper bound of its rows' lengths.
        self._crop()
        logits: Tensor = output.logits[torch.arange(len(new)), counts - 1]
        return logits

    def _drop_tail(self) -> None:
        """Drop the residues of a refresh from the cache."""
        kept = [min(n, max(len(ids) - self.refresh, 0)) for n, ids in zip(self.cached, self.token_ids, strict=True)]
        if kept == self.cached:
            return
        self.cached = kept
        if any(kept):
            self._crop()
        else:
            self.cache.reset()

    def _position_ids(self, new: list[list[int]]) -> Tensor | None:
        """Positions of the new tokens; None if they simply count on from the cache."""
        if self.positions is None:
            return None
        rows = [
            [*positions[begin:], after][: len(ids)]
            for ids, positions, begin, after in zip(new, self.positions, self.cached, self.next_positions, strict=True)
        ]
        return self.turbo.codes.batch(rows)[0].to(self.turbo.model.device)

    def _crop(self) -> None:
        if len(set(self.cached)) > 1:
            self.cache.crop(torch.tensor(self.cached))
        self.cache.crop(max(self.cached))


def _rows(x: Tensor, lengths: list[int]) -> list[list[int]]:
    """The first values of each row, as lists."""
    return [row[:n] for row, n in zip(x.tolist(), lengths, strict=True)]
