"""Chosen positions of proteins, masked and filled in step by step (Gibbs sampling; masked decoding by confidence).

The rest of a protein is a context that is computed and stored once, with the chosen positions masked. A step hides
the chosen positions' stored keys and values, runs these positions as they now stand, and with them their neighbours,
against all that is stored, and draws residues for some of them. So a step costs as much as there are chosen positions
and neighbours, however long the protein is; what it does not see is what the new residues would change in the rest.
Every few steps the whole is therefore computed anew and stored.

The orders are those in use for masked models: at random (Wang and Cho 2019, arXiv:1902.04094, as a sampler), or where
the model is most certain first (Ghazvininejad et al. 2019, arXiv:1904.09324). Later sweeps are Gibbs sampling: every
chosen position is masked once more and drawn again given all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esm_turbo.tasks.common.options import UnmaskingOrder

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.tasks.generation.sampling import ResidueSampler


class MaskedBatch:
    """Proteins of which some positions change, and the cache of the rest.

    Args:
        turbo: the model.
        rows: token ids of each protein, with `<cls>` and `<eos>`.
        chosen: the columns of each that change.
        refresh: residues on either side of a chosen one that run with it.
        refresh_every: steps from one computation of everything to the next; the first step of a sweep is one.

    Attributes:
        steps: of the sweep, so far.
    """

    def __init__(
        self,
        turbo: ContextModel,
        rows: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        refresh: int,
        refresh_every: int,
    ) -> None:
        self.turbo = turbo
        self.rows = [list(row) for row in rows]
        self.chosen = [sorted(columns) for columns in chosen]
        self.refresh_every = refresh_every
        self.steps = 0
        self.running = [
            sorted({x for c in columns for x in range(max(c - refresh, 1), min(c + refresh, len(row) - 2) + 1)})
            for row, columns in zip(self.rows, self.chosen, strict=True)
        ]
        self.cache: TurboKVCache | None = None

    def put(self, columns: Sequence[Collection[int]], token: int) -> None:
        """Puts a token into columns of each protein."""
        for row, own in zip(self.rows, columns, strict=True):
            for column in own:
                row[column] = token

    @torch.no_grad()
    def logits(self) -> list[Tensor]:
        """What the model predicts for the chosen columns of each protein, [columns, vocab_size] each."""
        due = self.steps % self.refresh_every == 0
        self.steps += 1
        return self._anew() if due else self._against_cache()

    def _anew(self) -> list[Tensor]:
        """Computes everything, and stores it where a later step reads it."""
        # Copies of one protein that are still alike are computed once, and share one row of the cache.
        alike = all(row == self.rows[0] for row in self.rows)
        ids, mask = self.turbo.codes.batch(self.rows[:1] if alike else self.rows)
        device = self.turbo.model.device
        output = self.turbo.model(ids.to(device), mask.to(device), use_cache=self.refresh_every > 1)
        self.cache = output.past_key_values
        logits = output.logits.expand(len(self.rows), -1, -1)
        return [logits[row, columns] for row, columns in enumerate(self.chosen)]

    def _against_cache(self) -> list[Tensor]:
        assert self.cache is not None
        codes, device = self.turbo.codes, self.turbo.model.device
        ids, mask = codes.batch(
            [[row[column] for column in columns] for row, columns in zip(self.rows, self.running, strict=True)]
        )
        position_ids, _ = codes.batch(self.running)
        seen = torch.zeros(len(self.rows), max(map(len, self.rows)), dtype=torch.int64)
        for row, columns in enumerate(self.running):
            seen[row, : len(self.rows[row])] = 1
            seen[row, columns] = 0
        output = self.turbo.model(
            ids.to(device),
            torch.cat([seen, mask], dim=1).to(device),
            position_ids.to(device),
            past_key_values=self.cache,
        )
        places = [
            [running.index(column) for column in columns]
            for running, columns in zip(self.running, self.chosen, strict=True)
        ]
        return [output.logits[row, columns] for row, columns in enumerate(places)]


def unmask(
    batch: MaskedBatch, sampler: ResidueSampler, mask_id: int, order: UnmaskingOrder, per_step: int, sweeps: int
) -> list[dict[int, float]]:
    """Masks the chosen positions and draws all of them, in every sweep once.

    Args:
        batch: the proteins; their rows are changed.
        sampler: draws, one row for each protein.
        mask_id: of `<mask>`.
        order: in which positions are drawn.
        per_step: how many of a protein are drawn at a step, independently of each other.
        sweeps: how often each is drawn.

    Returns:
        For each protein by column the log-probability that its residue had when it was drawn last.
    """
    log_probs: list[dict[int, float]] = [{} for _ in batch.rows]
    batch.put(batch.chosen, mask_id)
    for sweep in range(sweeps):
        by_confidence = order == "confidence" and sweep == 0
        turns = [_turns(batch, sampler, row, order, log_probs[row], by_confidence) for row in range(len(batch.rows))]
        waiting = [set(columns) for columns in batch.chosen]
        # A sweep begins with a refresh: a protein with fewer positions than others waits for them.
        batch.steps = 0
        for start in range(0, max(map(len, batch.chosen)), per_step):
            if not by_confidence:
                waiting = [set(turn[start : start + per_step]) for turn in turns]
                batch.put(waiting, mask_id)
            logits = batch.logits()
            for index, column, token, log_prob in _drawn(batch, sampler, logits, waiting, per_step, by_confidence):
                batch.rows[index][column] = token
                log_probs[index][column] = log_prob
                waiting[index].discard(column)
    return log_probs


def _turns(
    batch: MaskedBatch,
    sampler: ResidueSampler,
    row: int,
    order: UnmaskingOrder,
    log_probs: dict[int, float],
    by_confidence: bool,
) -> list[int]:
    """The columns of a row in the order in which a sweep draws them, where that is known before."""
    columns = batch.chosen[row]
    if by_confidence or order == "left_to_right":
        return columns
    if order == "confidence":
        # What fits worst goes first.
        return sorted(columns, key=lambda column: log_probs[column])
    return [columns[i] for i in torch.randperm(len(columns), generator=sampler.generators[row]).tolist()]


def _drawn(
    batch: MaskedBatch,
    sampler: ResidueSampler,
    logits: Sequence[Tensor],
    waiting: Sequence[set[int]],
    per_step: int,
    by_confidence: bool,
) -> Iterator[tuple[int, int, int, float]]:
    """Row, column, token and log-probability of every position that is drawn at a step."""
    for row, columns in enumerate(waiting):
        places = [(column, place) for place, column in enumerate(batch.chosen[row]) if column in columns]
        if not places:
            continue
        # A residue's position is its column: `<cls>` is column 0.
        positions = [column for column, _ in places]
        own = logits[row][[place for _, place in places]]
        if by_confidence:
            certainty = sampler.scores(own, positions).softmax(dim=1).amax(dim=1)
            best = certainty.argsort(descending=True, stable=True)[:per_step].tolist()
            positions, own = [positions[i] for i in best], own[best]
        tokens, log_probs = sampler.draw(own, [row] * len(positions), positions)
        yield from zip([row] * len(positions), positions, tokens, log_probs, strict=True)
