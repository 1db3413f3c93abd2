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

from esm_turbo.codecs.transfers import to_device
from esm_turbo.model.growth import StepKind
from esm_turbo.tasks.generation.sampling import NOT_FINITE

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.tasks.generation.sampling import ResidueSampler

# A capture takes about as long as this number of eager steps, and pays when the graph is used twice as often.
_STEPS_PER_USE = 4


class LeftToRight:
    """A batch whose rows grow by one residue per step.

    Args:
        cache: contexts without `<eos>`, one per row; it is changed.
        refresh: number of tokens at the end of each row that a refresh computes again; a number of at least the row's
            tokens computes the whole row.
        refresh_every: steps from one refresh to the next; the first step has one.
        token_ids: of each row, if the caller knows them and positions count from 0; otherwise they are read from the
            cache, which waits for a device.
    """

    def __init__(
        self,
        turbo: ContextModel,
        cache: TurboKVCache,
        refresh: int,
        refresh_every: int,
        token_ids: list[list[int]] | None = None,
    ) -> None:
        self.turbo = turbo
        self.cache = cache
        self.refresh = refresh
        self.refresh_every = refresh_every
        self.steps = 0
        # Copies of the cache's own state on the host, which are read without waiting for a device.
        self.positions: list[list[int]] | None = None
        if token_ids is not None:
            self.token_ids = token_ids
            self.cached = list(map(len, token_ids))
            self.next_positions = list(self.cached)
            return
        self.cached = cache.lengths.tolist()
        self.token_ids = _rows(cache.token_ids, self.cached)
        self.next_positions = cache.next_positions.tolist()
        if cache.positions is not None:
            self.positions = _rows(cache.positions, self.cached)

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

    def append(self, sampler: ResidueSampler, count: int, keep_cache: bool) -> list[list[float]]:
        """Draw and append tokens to every row, by captured steps where these are possible.

        Args:
            sampler: draws residues; its rows are those of the batch.
            count: number of tokens per row.
            keep_cache: whether the cache is needed afterwards, for `finish`.

        Returns:
            Log-probabilities of the tokens of each row.
        """
        rows = range(len(self.token_ids))
        log_probs: list[list[float]] = [[] for _ in rows]
        tried = False
        for step in range(count):
            if not tried and self._can_grow():
                tried = True
                grown = self._grow(sampler, count - step, keep_cache)
                if grown is not None:
                    return [before + after for before, after in zip(log_probs, grown, strict=True)]
            # <cls> is token 0, so the residue after n tokens has position n.
            tokens, scores = sampler.draw(self.logits(), rows, [len(ids) for ids in self.token_ids])
            self.push(tokens)
            for own, score in zip(log_probs, scores, strict=True):
                own.append(score)
        return log_probs

    def _can_grow(self) -> bool:
        """True if all rows run equally many tokens from here on, and each keeps one: rows are long enough."""
        first_runs_nothing = self.refresh == 0 and self.steps == 0
        return not first_runs_nothing and min(map(len, self.token_ids)) > self.refresh

    def _kind(self, step: int) -> StepKind:
        """The tokens that a step runs, once rows are long enough."""
        if step % self.refresh_every or self.refresh < 2:
            return StepKind(2, 1)
        # Of the tokens of a refresh, those that the next step runs again need not be stored.
        return StepKind(self.refresh + 1, 1 if self.refresh_every == 1 else self.refresh)

    @torch.no_grad()
    def _grow(self, sampler: ResidueSampler, count: int, keep_cache: bool) -> list[list[float]] | None:
        """See `append`; nothing waits for the device before all tokens are drawn. None where steps run eagerly."""
        model, codes = self.turbo.model, self.turbo.codes
        batch_size, device = len(self.token_ids), model.device
        steps = range(self.steps, self.steps + count)
        kinds = sorted({self._kind(0), self._kind(1)})
        known = list(map(len, self.token_ids))
        columns = max(known) + count + 1
        with model.growing(self.cache, kinds, columns, count // _STEPS_PER_USE) as growth:
            if growth is None:
                return None
            growth.load(
                self.cache,
                codes.batch(self.token_ids)[0],
                torch.tensor(known),
                torch.tensor([ids.count(codes.mask) for ids in self.token_ids]),
                self._all_positions(columns),
            )
            # Its rows are among the contexts of the graph now.
            self.cache.reset()
            everywhere = to_device(sampler.allowed.everywhere[None], device)
            results, finite = [], []
            for number, step in enumerate(steps):
                logits = model.lm_head(growth.step(self._kind(step))[:batch_size]).float()
                allowed = everywhere
                if sampler.allowed.by_position:
                    allowed = to_device(sampler.allowed.at([n + number for n in known]), device)
                noise = sampler.noise(range(batch_size))
                chosen, scores = sampler.choose(logits, allowed, None if noise is None else to_device(noise, device))
                growth.push(chosen)
                results.append(torch.stack([chosen.float(), scores]))
                finite.append(logits.isfinite().all())
            last = self._kind(steps[-1])
            self.cached = [n + count - last.tokens + last.stored for n in known]
            if keep_cache:
                self.cache = growth.copy(batch_size, max(self.cached))
            drawn, log_probs = torch.stack(results).permute(1, 2, 0).cpu()
            if not bool(torch.stack(finite).all()):
                raise ValueError(NOT_FINITE)
        self.steps += count
        for tokens in drawn.T.long().tolist():
            self.push(tokens)
        rows: list[list[float]] = log_probs.tolist()
        return rows

    def _all_positions(self, columns: int) -> Tensor | None:
        """Positions of all columns to come, [rows, columns]; None if they simply count on from the first."""
        if self.positions is None:
            return None
        rows = zip(self.positions, self.next_positions, strict=True)
        return torch.tensor([[*own, *range(after, after + columns - len(own))] for own, after in rows])

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
        output = self.turbo.model(
            input_ids,
            mask,
            self._position_ids(new),
            past_key_values=self.cache,
            use_cache=True,
            append_mask=steps < (counts - masks)[:, None],
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
        return self.turbo.codes.batch(rows)[0]

    def _crop(self) -> None:
        if len(set(self.cached)) > 1:
            self.cache.crop(torch.tensor(self.cached))
        self.cache.crop(max(self.cached))


def _rows(x: Tensor, lengths: list[int]) -> list[list[int]]:
    """The first values of each row, as lists."""
    return [row[:n] for row, n in zip(x.tolist(), lengths, strict=True)]
