"""Chains of a context: which tokens may see each other, by `sequence_id`."""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs.row_index import RowIndex, of_rows
from esm_turbo.kv_cache import MAX_POSITION, TurboKVCache


def check_chains(sequence_id: Tensor, shapes: list[tuple[int, int]]) -> None:
    """Check shape and dtype.

    Raises:
        ValueError: `sequence_id` has another shape, or is not of integers.
    """
    if tuple(sequence_id.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"`sequence_id` must be {allowed}, got {list(sequence_id.shape)}")
    if sequence_id.is_floating_point() or sequence_id.dtype == torch.bool:
        raise ValueError(f"`sequence_id` must be integers, got {sequence_id.dtype}")


def _on_host(sequence_id: Tensor) -> Tensor:
    """Chains on the CPU, which a cache stores as int32.

    Raises:
        ValueError: one is too large for that.
    """
    sequence_id = sequence_id.cpu()
    if sequence_id.numel() and (largest := int(sequence_id.max())) > MAX_POSITION:
        raise ValueError(f"chains in `sequence_id` may be numbered up to {MAX_POSITION}, got {largest}")
    return sequence_id


def mask_of_chains(sequence_id: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mask of the real tokens of a context, int64 [batch, n]: padding is in no chain.

    Raises:
        ValueError: `attention_mask` says otherwise, or a number is too large.
    """
    mask = (_on_host(sequence_id) >= 0).long()
    if attention_mask is not None and not torch.equal(mask, (attention_mask.cpu() != 0).long()):
        raise ValueError("`sequence_id` and `attention_mask` contradict each other: -1 is for padding, and only for it")
    return mask


def mask_of_extension(
    cache: TurboKVCache,
    sequence_id: Tensor,
    attention_mask: Tensor | None,
    num_tokens: int,
    index: RowIndex | None = None,
) -> tuple[Tensor, Tensor]:
    """The mask of past and new tokens that an extension of one chain per row sees.

    Args:
        cache: the context.
        sequence_id: chain of the new tokens, [batch, n], or of past and new ones, [batch, past + n]; -1 for padding.
        attention_mask: as in the model's forward; hides more.
        num_tokens: n.
        index: row of the cache that each row reads; None if they are the same, or one that all share.

    Returns:
        The mask, int64 [batch, past + n], and the chains of the new tokens, [batch, n]; on the CPU.

    Raises:
        ValueError: a row's new tokens are of several chains, or the chains of the past are not those of the cache.
    """
    past, sequence_id = cache.get_seq_length(), _on_host(sequence_id)
    new = sequence_id[:, -num_tokens:]
    valid = of_rows(cache.valid()[:, :past], index).cpu()
    stored = torch.zeros_like(valid, dtype=torch.int32)
    if cache.chains is not None:
        stored = of_rows(cache.chains[:, :past], index).cpu()
    own, real = new[:, :1], new >= 0
    if bool((real & (new != own)).any()):
        row = int((real & (new != own)).any(1).nonzero()[0])
        found = sorted(set(new[row][real[row]].tolist()))
        raise ValueError(f"`sequence_id` puts the new tokens of row {row} into chains {found}: extend one at a time")
    if sequence_id.shape[1] > num_tokens:
        differs = torch.where(valid, stored, -1) != sequence_id[:, :past]
        if bool(differs.any()):
            row, column = (int(index) for index in differs.nonzero()[0])
            given = int(sequence_id[row, column])
            there = int(torch.where(valid, stored, -1)[row % len(valid), column])
            raise ValueError(
                f"`sequence_id` says chain {given} of token {column} in row {row}, the cache {there}: give it for"
                " the new tokens alone"
            )
    seen = valid & (stored == own)
    if attention_mask is not None:
        if attention_mask.shape[1] not in (num_tokens, past + num_tokens):
            raise ValueError(
                f"`attention_mask` has {attention_mask.shape[1]} columns; needed are {num_tokens}, of the new tokens,"
                f" or {past + num_tokens}, with the past"
            )
        attention_mask = attention_mask.cpu()
        if attention_mask.shape[1] > num_tokens:
            seen = seen & (attention_mask[:, :past] != 0)
        real = real & (attention_mask[:, -num_tokens:] != 0)
    return torch.cat([seen, real], dim=1).long(), new
