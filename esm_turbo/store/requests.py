"""Requests for contexts, by the keys under which a store keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esm_turbo.context_model import ContextModel, Sequences, as_list, totals_per_row
from esm_turbo.proteins.batches import TokenRow


@dataclass(frozen=True)
class PrefillRequest:
    """A request for a context.

    Attributes:
        key: of its file.
        sequence: residues as given; empty where tokens were given.
        tokens: number of tokens that are stored, such as `<cls>` and the residues.
        masks: number of `<mask>` tokens among them.
        total_tokens: for token dropout, see `ContextModel.prefill`.
        total_masks: likewise.
    """

    key: str
    sequence: str
    tokens: int
    masks: int
    total_tokens: int
    total_masks: int


def context_requests(
    turbo: ContextModel,
    sequences: Sequences,
    total_tokens: int | Sequence[int] | None = None,
    total_masks: int | Sequence[int] | None = None,
) -> list[PrefillRequest]:
    """Requests for the contexts of sequences, with the arguments of `ContextModel.prefill`.

    Raises:
        ValueError: a sequence is invalid, or there are not as many totals as sequences.
    """
    sequences = as_list(sequences)
    rows = turbo.encode_contexts(sequences)
    tokens = [len(row) for row in turbo.codes.present(rows)[0]]
    masks = [int((row == turbo.codes.mask).sum()) for row in rows]
    all_tokens = totals_per_row("total_tokens", total_tokens, tokens)
    all_masks = totals_per_row("total_masks", total_masks, masks)
    requests = []
    for sequence, row, *counts in zip(sequences, rows, tokens, masks, all_tokens, all_masks, strict=True):
        requests.append(PrefillRequest(_key(row, *counts[2:]), sequence, *counts))
    return requests


def deduplicate(requests: Sequence[PrefillRequest]) -> list[PrefillRequest]:
    """The requests without repeated ones."""
    return list({one.key: one for one in requests}.values())


def request_of_tokens(turbo: ContextModel, token_ids: Sequence[int]) -> PrefillRequest:
    """A request for the context of exactly these tokens, special ones included."""
    row = np.array(token_ids, dtype=np.uint8)
    [present], _ = turbo.codes.present([row])
    counts = len(present), int((row == turbo.codes.mask).sum())
    return PrefillRequest(_key(row, *counts), "", *counts, *counts)


def _key(row: TokenRow, total_tokens: int, total_masks: int) -> str:
    """A digest of everything that a context depends on besides model, preset, calibration and dtype."""
    return hashlib.sha256(row.tobytes() + f"|{total_tokens}|{total_masks}".encode()).hexdigest()
