"""Replacing chosen positions of proteins step by step: Gibbs sampling, and masked decoding by confidence.

The rest of a protein is a context, computed and cached once with the chosen positions masked. A step hides the cached
keys and values of the chosen positions and their neighbours, runs these tokens as they now are against the rest of the
cache, and draws residues for some of them. Its cost depends on the number of these tokens, not on the protein's
length. A step does not see how the new residues would change the rest, so every few steps a refresh computes and
caches the whole protein again.

The orders are those in use for masked models: at random (Wang and Cho 2019, arXiv:1902.04094, as a sampler), or where
the model is most certain first (Ghazvininejad et al. 2019, arXiv:1904.09324). Later sweeps are Gibbs sampling: each
chosen position is masked again and drawn given all others.

Of a family with exact contexts, every step runs whole proteins, alone or after homologs that are cached once.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Collection, Generator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esm_turbo.tasks.common.forwards import default_config
from esm_turbo.tasks.common.options import UnmaskingOrder

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.tasks.generation.sampling import ResidueSampler


class MaskedBatch:
    """Proteins of which some columns change, and the cache of the rest.

    Args:
        rows: token ids of each protein, from the last one before its residues, such as `<cls>`, to `<eos>`.
        chosen: the columns of each protein that change; that of a residue is its position.
        refresh: number of residues on either side of a chosen column that run with it.
        refresh_every: steps from one computation of the whole proteins to the next; the first step of a sweep is one.
        contexts: homologs that every protein is read after, one row each, which take a `refresh_every` of 1; of
            several, log-probabilities are averaged.

    Attributes:
        rows: token ids of each protein as they now are.
        chosen: the columns that change, in ascending order.
        running: the columns that run in a step: chosen ones and their neighbours, in ascending order.
        steps: number of steps of the sweep so far.
        ran: tokens that the last step ran.
    """

    def __init__(
        self,
        turbo: ContextModel,
        rows: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        refresh: int,
        refresh_every: int,
        contexts: Sequence[TurboKVCache] = (),
    ) -> None:
        self.turbo = turbo
        self.contexts = contexts
        self.rows = [list(row) for row in rows]
        self.chosen = [sorted(columns) for columns in chosen]
        self.refresh_every = refresh_every
        self.steps = self.ran = 0
        self.running = [
            sorted({x for c in columns for x in range(max(c - refresh, 1), min(c + refresh, len(row) - 2) + 1)})
            for row, columns in zip(self.rows, self.chosen, strict=True)
        ]
        self.cache: TurboKVCache | None = None
        # Once, as the preset of the model may be another between two steps.
        self._config = default_config(turbo)

    def put(self, columns: Sequence[Collection[int]], token: int) -> None:
        """Set columns of each protein to a token."""
        for row, own in zip(self.rows, columns, strict=True):
            for column in own:
                row[column] = token

    @torch.no_grad()
    def logits(self) -> list[Tensor]:
        """Predictions for the chosen columns of each protein, [columns, vocab_size] each, on the CPU."""
        due = self.steps % self.refresh_every == 0
        self.steps += 1
        logits, columns = (self._recompute(), self.chosen) if due else (self._extend(), self._chosen_of_running)
        sizes = list(map(len, columns))
        rows = [row if len(logits) > 1 else 0 for row, size in enumerate(sizes) for _ in range(size)]
        # One copy for all rows: each waits for the device.
        return list(logits[rows, list(chain.from_iterable(columns))].cpu().split(sizes))

    def _recompute(self) -> Tensor:
        """Run whole proteins, and cache them if a later step reads the cache. Logits [rows or 1, n, vocab_size]."""
        # Samples of one protein that are still identical are computed once and share one row of the cache.
        identical = all(row == self.rows[0] for row in self.rows)
        rows = self.rows[:1] if identical else self.rows
        before, model = self.turbo.codes.before[:-1], self.turbo.model
        rows = [[*before, *row] for row in rows]
        ids, mask = self.turbo.codes.batch(rows)
        self.ran = ids.numel() * max(1, len(self.contexts))
        logits: Tensor
        if self.contexts:
            found = [model(ids, mask, past_key_values=context).logits.float() for context in self.contexts]
            logits = found[0] if len(found) == 1 else torch.stack([x.log_softmax(-1) for x in found]).mean(dim=0)
        else:
            caches = self.refresh_every > 1
            cache = model.base_model.kv.cache_within_call(self._config) if caches else None
            lengths = list(map(len, rows))
            output = model(ids, mask, past_key_values=cache, use_cache=caches, row_lengths=lengths)
            self.cache, logits = output.past_key_values, output.logits
        return logits[:, len(before) :]

    def _extend(self) -> Tensor:
        """Run the chosen columns and their neighbours against the rest in the cache. Logits [rows, n, vocab_size]."""
        assert self.cache is not None
        ids, _ = self.turbo.codes.batch(
            [[row[column] for column in columns] for row, columns in zip(self.rows, self.running, strict=True)]
        )
        self.ran = ids.numel()
        logits: Tensor = self.turbo.model(ids, *self._seen_and_positions, past_key_values=self.cache).logits
        return logits

    @functools.cached_property
    def _seen_and_positions(self) -> tuple[Tensor, Tensor]:
        """Attention mask and positions of every extension."""
        position_ids, mask = self.turbo.codes.batch(self.running)
        visible = torch.zeros(len(self.rows), max(map(len, self.rows)), dtype=torch.int64)
        for row, columns in enumerate(self.running):
            visible[row, : len(self.rows[row])] = 1
            visible[row, columns] = 0
        return torch.cat([visible, mask], dim=1), position_ids

    @functools.cached_property
    def _chosen_of_running(self) -> list[list[int]]:
        """The indices of the chosen columns among those that run."""
        return [
            [bisect_left(running, column) for column in columns]
            for running, columns in zip(self.running, self.chosen, strict=True)
        ]


def unmask(
    batch: MaskedBatch, sampler: ResidueSampler, mask_id: int, order: UnmaskingOrder, per_step: int, sweeps: int
) -> Generator[int, None, list[dict[int, float]]]:
    """Mask the chosen columns and draw each of them, once per sweep; yield after each step the tokens that it ran.

    Args:
        batch: the proteins; their rows are changed.
        sampler: draws residues, one row per protein.
        mask_id: token id of `<mask>`.
        order: the order in which columns are drawn.
        per_step: number of columns of a protein drawn per step, independently of each other.
        sweeps: how often each column is drawn.

    Returns:
        For each protein, by column, the log-probability of the residue when it was last drawn.
    """
    log_probs: list[dict[int, float]] = [{} for _ in batch.rows]
    batch.put(batch.chosen, mask_id)
    for sweep in range(sweeps):
        by_confidence = order == "confidence" and sweep == 0
        waiting = [set(columns) for columns in batch.chosen]
        if not by_confidence:
            known = zip(batch.chosen, log_probs, sampler.generators, strict=True)
            orders = [_order(columns, order, scores, generator) for columns, scores, generator in known]
        # Every sweep begins with a refresh; a protein with fewer chosen columns than others waits for them.
        batch.steps = 0
        for start in range(0, max(map(len, batch.chosen)), per_step):
            if not by_confidence:
                waiting = [set(columns[start : start + per_step]) for columns in orders]
                batch.put(waiting, mask_id)
            rows: list[int] = []
            drawn_at: list[int] = []
            parts: list[Tensor] = []
            for row, (logits, columns) in enumerate(zip(batch.logits(), waiting, strict=True)):
                indices = [index for index, column in enumerate(batch.chosen[row]) if column in columns]
                if not indices:
                    continue
                # With <cls> in column 0, a residue's column is its position.
                positions, own = [batch.chosen[row][index] for index in indices], logits[indices]
                if by_confidence:
                    certainty = sampler.scores(own, positions).softmax(dim=1).amax(dim=1)
                    best = certainty.argsort(descending=True, stable=True)[:per_step].tolist()
                    positions, own = [positions[i] for i in best], own[best]
                rows += [row] * len(positions)
                drawn_at += positions
                parts.append(own)
            drawn = zip(rows, drawn_at, *sampler.draw(torch.cat(parts), rows, drawn_at), strict=True)
            for row, column, token, log_prob in drawn:
                batch.rows[row][column] = token
                log_probs[row][column] = log_prob
                waiting[row].discard(column)
            yield batch.ran
    return log_probs


def _order(
    columns: list[int], order: UnmaskingOrder, log_probs: dict[int, float], generator: torch.Generator
) -> list[int]:
    """The columns of a row in the order in which a sweep draws them, if that is known in advance."""
    if order == "left_to_right":
        return columns
    if order == "confidence":
        # The least likely residue goes first.
        return sorted(columns, key=log_probs.__getitem__)
    return [columns[i] for i in torch.randperm(len(columns), generator=generator).tolist()]
