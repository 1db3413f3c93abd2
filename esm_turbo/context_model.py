"""`ContextModel`: what every task needs of a model, and nothing more.

Tasks, stores and evaluations are written against this class, so that they never depend on how a model is loaded.
`TurboEsm` adds loading and the tasks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.files.hub import model_name
from esm_turbo.proteins.tokens import TokenCodes

if TYPE_CHECKING:
    from transformers import EsmTokenizer

    from esm_turbo.calibration import Calibration
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.modeling_esm_turbo import TurboEsmForMaskedLM

__all__ = ["ContextModel", "ExtendOutput"]


@dataclass(frozen=True)
class ExtendOutput:
    """What an extension computes for the new residues and `<eos>`.

    Attributes:
        hidden_states: of the last layer, after its layer norm, [batch, n, hidden_size].
        logits: [batch, n, vocab_size].
        attention_mask: 1 for tokens, 0 for padding on the right, [batch, n].
    """

    hidden_states: Tensor
    logits: Tensor
    attention_mask: Tensor


class ContextModel:
    """A model that caches contexts and extends them.

    Attributes:
        model: `TurboEsmForMaskedLM`.
        tokenizer: `EsmTokenizer`.
        codes: token ids of residues and special tokens.
    """

    def __init__(self, model: TurboEsmForMaskedLM, tokenizer: EsmTokenizer) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.codes = TokenCodes.of(tokenizer)

    @property
    def calibration(self) -> Calibration | None:
        """The model's calibration, if it has one."""
        calibration: Calibration | None = self.model.esm.calibration
        return calibration

    @property
    def name(self) -> str:
        """The hub id of the model, or the name of its folder."""
        return model_name(self.model.config._name_or_path) or "a model without a name"

    @torch.no_grad()
    def prefill(
        self,
        sequences: str | Sequence[str],
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
    ) -> TurboKVCache:
        """Computes contexts exactly and stores them: `<cls>` and the residues, without `<eos>`.

        Args:
            sequences: residues; `<mask>` may stand for one.
            total_tokens: tokens of the whole input that a context is the beginning of, `<cls>` and `<eos>` included,
                for token dropout; one number or one per sequence. None counts the context alone.
            total_masks: masks of that whole input, likewise.

        Returns:
            A cache of one row per sequence.

        Raises:
            ValueError: a sequence is empty or has letters that are no residues, or a total is smaller than the
                context's own count.
        """
        sequences = as_list(sequences)
        rows = [[self.codes.cls, *self.codes.encode(s, f"sequence {i + 1}")] for i, s in enumerate(sequences)]
        input_ids, attention_mask = self.codes.batch(rows)
        counts = None
        if total_tokens is not None or total_masks is not None:
            counts = (
                _totals("total_tokens", total_tokens, attention_mask.sum(1)),
                _totals("total_masks", total_masks, (input_ids == self.codes.mask).sum(1)),
            )
            if bool((counts[1] >= counts[0]).any()):
                raise ValueError("`total_masks` must be smaller than `total_tokens`")
        device = self.model.device
        output = self.model.esm(
            input_ids.to(device),
            attention_mask.to(device),
            use_cache=True,
            token_counts=counts,
            row_lengths=[len(row) for row in rows],
        )
        cache: TurboKVCache = output.past_key_values
        return cache

    @torch.no_grad()
    def extend(
        self,
        cache: TurboKVCache,
        sequences: str | Sequence[str],
        eos: bool = True,
        refresh: int = DEFAULT_REFRESH,
        append: bool = False,
    ) -> ExtendOutput:
        """Runs new residues after cached contexts.

        Args:
            cache: as many rows as sequences, or one row that all share. It is changed only where `append` says so.
            sequences: the new residues of each row; `<mask>` may stand for one.
            eos: end with `<eos>`.
            refresh: the last residues of the context that run again together with the new ones, their stored keys and
                values set aside. It removes most of the freezing error.
            append: add the new residues (not `<eos>`) to the cache.

        Returns:
            Of the new residues and `<eos>`, padded on the right.

        Raises:
            ValueError: the batch does not match the cache, the cache is empty or another model's, or a sequence is bad.
        """
        sequences = as_list(sequences)
        if refresh < 0:
            raise ValueError(f"`refresh` must be at least 0, got {refresh}")
        if cache.batch_size not in (1, len(sequences)):
            raise ValueError(f"the cache has {cache.batch_size} rows, but there are {len(sequences)} sequences")
        if not bool((cache.lengths > 0).all()):
            raise ValueError("the cache has an empty row: prefill a context first")
        tails = _tails(cache, refresh, len(sequences), self.codes.cls)
        rows, kept = [], []
        for number, (sequence, tail) in enumerate(zip(sequences, tails, strict=True), start=1):
            new = self.codes.encode(sequence, f"sequence {number}")
            rows.append([*tail.token_ids, *new, *([self.codes.eos] if eos else [])])
            kept.append((len(tail.token_ids), len(tail.token_ids) + len(new)))
        input_ids, mask = self.codes.batch(rows)
        steps = torch.arange(input_ids.shape[1])
        begin, end = (torch.tensor(bound)[:, None] for bound in zip(*kept, strict=True))
        past = torch.arange(cache.get_seq_length()) < torch.tensor([tail.column for tail in tails])[:, None]
        positions = torch.stack([_positions(tail, len(steps)) for tail in tails])
        device = self.model.device
        output = self.model(
            input_ids.to(device),
            torch.cat([past.long(), mask], dim=1).to(device),
            positions.to(device),
            past_key_values=cache,
            use_cache=append,
            append_mask=((steps >= begin) & (steps < end)).to(device),
            output_hidden_states=True,
        )
        # Row b's new tokens start after its refreshed ones.
        width = int((mask.sum(1, keepdim=True) - begin).max())
        column = begin + torch.arange(width)
        new_mask = (column < mask.sum(1, keepdim=True)).long()
        index = column.clamp_max(len(steps) - 1)[..., None].to(device)
        hidden = output.hidden_states[-1]
        return ExtendOutput(
            hidden.gather(1, index.expand(-1, -1, hidden.shape[2])),
            output.logits.gather(1, index.expand(-1, -1, output.logits.shape[2])),
            new_mask.to(device),
        )


@dataclass(frozen=True)
class _Tail:
    """The end of a context that runs again: its tokens, their positions, and the column where it begins."""

    column: int
    token_ids: list[int]
    positions: list[int]
    next_position: int


def _tails(cache: TurboKVCache, refresh: int, batch_size: int, cls_id: int) -> list[_Tail]:
    lengths, ids, nexts = cache.lengths.tolist(), cache.token_ids.cpu(), cache.next_positions.tolist()
    positions = None if cache.positions is None else cache.positions.cpu()
    tails = []
    for row, length in enumerate(lengths):
        first_residue = 1 if int(ids[row, 0]) == cls_id else 0
        column = max(first_residue, length - refresh)
        where = list(range(column, length)) if positions is None else positions[row, column:length].tolist()
        tails.append(_Tail(column, ids[row, column:length].tolist(), where, nexts[row]))
    return tails * batch_size if len(tails) == 1 else tails


def _positions(tail: _Tail, n: int) -> Tensor:
    after = range(tail.next_position, tail.next_position + n - len(tail.positions))
    return torch.tensor([*tail.positions, *after])


def as_list(sequences: str | Sequence[str]) -> list[str]:
    """One sequence or several as a list; a ValueError if there are none."""
    sequences = [sequences] if isinstance(sequences, str) else list(sequences)
    if not sequences:
        raise ValueError("`sequences` must hold at least one sequence")
    return sequences


def _totals(name: str, given: int | Sequence[int] | None, own: Tensor) -> Tensor:
    if given is None:
        return own
    totals = torch.as_tensor(given, dtype=torch.int64)
    if totals.shape not in ((), own.shape):
        raise ValueError(f"`{name}` must be one number or one per sequence ({len(own)}), got {given}")
    totals = totals.expand(len(own))
    if bool((totals < own).any()):
        raise ValueError(f"`{name}` must be at least the context's own {own.tolist()}, got {totals.tolist()}")
    return totals
