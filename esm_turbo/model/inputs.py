"""Checks of the inputs of a forward, and the masks, counts and positions derived from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from esm_turbo.codecs.row_index import RowIndex, of_rows
from esm_turbo.kv.append import NO_GAPS, NewTokens
from esm_turbo.kv_cache import MAX_POSITION, TurboKVCache
from esm_turbo.model.pooled import PooledContexts


def check_inputs(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, vocab_size: int, *, extends: bool
) -> None:
    """Check shapes, dtypes and values. Masks and positions on a device are waited for; ids there are not looked at.

    The mask of a forward that extends contexts may have more columns, see `split_attention_mask`.

    Raises:
        ValueError: naming the input that is wrong, with the value found and the values allowed.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"`input_ids` must be [batch, n] with n >= 1, got {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`input_ids` must be int64 or int32, got {input_ids.dtype}")
    if attention_mask is not None and extends and attention_mask.dim() != 2:
        raise ValueError(f"`attention_mask` must have two dimensions, got {list(attention_mask.shape)}")
    if attention_mask is not None and not extends and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` must be [batch, n] = {list(input_ids.shape)}, got {list(attention_mask.shape)}"
        )
    n = input_ids.shape[1]
    if position_ids is not None and position_ids.shape not in (input_ids.shape, (1, n)):
        raise ValueError(f"`position_ids` must be [batch, {n}] or [1, {n}], got {list(position_ids.shape)}")
    if position_ids is not None and (position_ids.is_floating_point() or position_ids.dtype == torch.bool):
        raise ValueError(f"`position_ids` must be integers, got {position_ids.dtype}")
    if input_ids.device.type == "cpu" and bool(((input_ids < 0) | (input_ids >= vocab_size)).any()):
        raise ValueError(f"`input_ids` must lie in 0 to {vocab_size - 1}")
    if position_ids is not None and (positions := on_host(position_ids)) is not None:
        check_positions(positions)
    mask = None if attention_mask is None else on_host(attention_mask)
    if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("`attention_mask` must hold zeros and ones")


def on_host(x: Tensor) -> Tensor | None:
    """An input on the CPU; None of one on a device that cannot be waited for, as the caller captures a graph."""
    return None if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing() else x.cpu()


def check_positions(position_ids: Tensor) -> None:
    """Check that positions, on the CPU, can be stored.

    Raises:
        ValueError: a position is negative, or does not fit into int32.
    """
    outside = position_ids[(position_ids < 0) | (position_ids > MAX_POSITION)]
    if outside.numel():
        raise ValueError(f"`position_ids` must lie in 0 to {MAX_POSITION}, got {int(outside[0])}")


def most_specials(input_ids: Tensor, append_mask: Tensor | None, special_ids: Sequence[int]) -> int:
    """The most special tokens that any row stores, at most; a device is waited for.

    Args:
        input_ids: [batch, n].
        append_mask: tokens to store, bool [batch, n], which were checked; None for all.
        special_ids: ids of special tokens.
    """
    if not special_ids:
        return 0
    special = torch.isin(input_ids.cpu(), torch.tensor(special_ids))
    if append_mask is not None:
        special &= append_mask.cpu()
    return int(special.sum(1).max())


def check_new_tokens(input_ids: Tensor, attention_mask: Tensor | None, append_mask: Tensor | None) -> NewTokens:
    """Check which tokens are real, and which of them a cache is to store; a device is waited for.

    Args:
        input_ids: [batch, n].
        attention_mask: as of `check_inputs`; columns before the last n are of a past.
        append_mask: tokens to store; None for all real ones.

    Raises:
        ValueError: the mask is not padded on the right, or `append_mask` has another shape or dtype, or keeps padding.
    """
    if attention_mask is None and append_mask is None:
        return NO_GAPS
    shape = input_ids.shape
    mask = torch.ones(shape) if attention_mask is None else on_host(attention_mask)
    if mask is None:
        return NewTokens(append_mask is not None, maybe_empty=True)
    mask = mask[:, -shape[1] :] != 0
    if bool((gaps := has_gaps(mask)).any()):
        row = int(gaps.nonzero()[0])
        raise ValueError(f"`attention_mask` of row {row} is padded on the left or has holes; pad on the right")
    if append_mask is None:
        return NewTokens(maybe_empty=not bool(mask.any(1).all()))
    if append_mask.shape != shape or append_mask.dtype != torch.bool:
        raise ValueError(f"`append_mask` must be bool {list(shape)}, got {append_mask.dtype} {list(append_mask.shape)}")
    if (keep := on_host(append_mask)) is None:
        return NewTokens(skips=True, maybe_empty=True)
    if mask.shape == shape and bool((keep & ~mask).any()):
        raise ValueError("`append_mask` keeps tokens that `attention_mask` hides")
    return NewTokens(bool(has_gaps(keep).any()), not bool(keep.any(1).all()))


def check_context_index(context_index: Sequence[int] | Tensor, batch_size: int, contexts: int) -> RowIndex:
    """The context that each row names; on a device it has to be waited for.

    Args:
        context_index: integers [batch].
        batch_size: number of rows.
        contexts: number of contexts.

    Raises:
        ValueError: it is not integers [batch], or a row names a context that there is not.
    """
    allowed = f"`context_index` must be integers [batch] = [{batch_size}]"
    try:
        index = torch.as_tensor(context_index)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{allowed}, got {context_index!r}") from error
    if index.shape != (batch_size,) or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"{allowed}, got {index.dtype} {list(index.shape)}")
    numbers = index.cpu().numpy().astype(np.int64)
    outside = np.flatnonzero((numbers < 0) | (numbers >= contexts))
    if len(outside):
        raise ValueError(
            f"`context_index` of row {outside[0]} must lie in 0 to {contexts - 1}, got {numbers[outside[0]]}"
        )
    return RowIndex(numbers)


def contexts_of_rows(
    cache: TurboKVCache, context_index: Sequence[int] | Tensor | RowIndex | None, batch_size: int
) -> RowIndex | None:
    """The context of each row; None if row i reads context i, or all share one, and nothing has to be looked up.

    Raises:
        ValueError: of `check_context_index`, or there is none and the numbers of rows and of contexts differ.
    """
    contexts = cache.batch_size
    if isinstance(context_index, RowIndex):
        return context_index
    if context_index is None and contexts not in (1, batch_size):
        raise ValueError(
            f"the cache has {contexts} rows, the extension {batch_size}; only 1 row is shared, unless rows name theirs"
            " in `context_index`"
        )
    if isinstance(cache, PooledContexts) and context_index is None:
        context_index = [row % contexts for row in range(batch_size)]
    index = None if context_index is None else check_context_index(context_index, batch_size, contexts)
    return index if contexts > 1 or isinstance(cache, PooledContexts) else None


def token_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Mask of the real tokens, bool [batch, n]: all of them without an `attention_mask`."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask != 0


def count_tokens(input_ids: Tensor, mask: Tensor, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Number of real tokens and of `<mask>` tokens among them per row, int64 [batch] each."""
    return mask.sum(1), (mask & (input_ids == mask_token_id)).sum(1)


def count_tokens_with_past(
    cache: TurboKVCache,
    past_mask: Tensor | None,
    input_ids: Tensor,
    mask: Tensor,
    mask_token_id: int,
    index: RowIndex | None,
) -> tuple[Tensor, Tensor]:
    """Number of tokens and of `<mask>` tokens that each row sees, past and new together, int64 [batch] each.

    Args:
        cache: the past.
        past_mask: which of its tokens each row sees, bool [batch, past]; None for all.
        input_ids: the new tokens, [batch, n].
        mask: which of them are real, bool [batch, n].
        mask_token_id: id of `<mask>`.
        index: row of the cache that each row reads.
    """
    seen = of_rows(cache.valid(), index) if past_mask is None else past_mask
    tokens, masks = count_tokens(input_ids, mask, mask_token_id)
    masked = seen & of_rows(cache.token_ids == mask_token_id, index)
    return tokens + seen.sum(1), masks + masked.sum(1)


def check_counts(counts: tuple[Tensor, Tensor], batch_size: int) -> None:
    """Check the counts of a larger input; a device is waited for.

    Raises:
        ValueError: they are not integers [batch], or there are fewer tokens than masks, or negative numbers.
    """
    for count in counts:
        if count.shape != (batch_size,) or count.is_floating_point() or count.dtype == torch.bool:
            found = f"{count.dtype} {list(count.shape)}"
            raise ValueError(f"`token_counts` must be two tensors of integers [batch] = [{batch_size}], got {found}")
    tokens, masks = (count.cpu() for count in counts)
    if bool(((masks < 0) | (tokens < masks)).any()):
        raise ValueError(
            f"`token_counts` must be tokens, and masks among them, got {tokens.tolist()}, {masks.tolist()}"
        )


def check_lengths(row_lengths: Sequence[int], attention_mask: Tensor) -> None:
    """Check the numbers of tokens of a batch against its mask [batch, n], if that lies on the CPU.

    Raises:
        ValueError: they contradict each other.
    """
    if attention_mask.device.type != "cpu":
        return
    if list(row_lengths) != (found := (attention_mask != 0).sum(1).tolist()):
        raise ValueError(f"`row_lengths` {list(row_lengths)} are not the sums of `attention_mask`, {found}")
    if bool(has_gaps(attention_mask != 0).any()):
        raise ValueError("`row_lengths` are of rows that are padded on the right, without holes")


def check_not_all_masked(counts: tuple[Tensor, Tensor]) -> None:
    """Check that token dropout has a scale for every row (counts on the CPU only).

    Raises:
        ValueError: a row consists of `<mask>` and padding alone.
    """
    tokens, masks = counts
    if tokens.device.type == "cpu" and bool((masks >= tokens).any()):
        row = int((masks >= tokens).nonzero()[0])
        raise ValueError(f"row {row} has no token but <mask> or padding: token dropout has no scale for it")


def split_attention_mask(
    cache: TurboKVCache, input_ids: Tensor, attention_mask: Tensor | None, index: RowIndex | None = None
) -> tuple[Tensor | None, Tensor]:
    """Split the mask of an extension into that of the past and that of the new tokens.

    Args:
        cache: the past.
        input_ids: the new tokens, [batch, n].
        attention_mask: [batch, n] or [batch, past + n]; None for all tokens.
        index: of the rows, where they name theirs.

    Returns:
        The visible columns of the cache, bool [batch, columns] or None for all of them, and the real new tokens, bool
        [batch, n].

    Raises:
        ValueError: the mask has another shape, or (on the CPU only) shows tokens that the cache does not hold.
    """
    batch_size, n = input_ids.shape
    past = cache.get_seq_length() if attention_mask is not None and attention_mask.shape[1] != n else 0
    if attention_mask is not None and attention_mask.shape != (batch_size, past + n):
        raise ValueError(
            f"`attention_mask` must be [batch, n] = [{batch_size}, {n}] or [batch, past + n] ="
            f" [{batch_size}, {cache.get_seq_length() + n}], got {list(attention_mask.shape)}"
        )
    valid = cache.valid()
    ragged = valid.device.type != "cpu" or not bool(valid.all())
    valid = of_rows(valid, index)
    past_mask = valid.expand(batch_size, -1) if ragged else None
    if past:
        assert attention_mask is not None
        given = attention_mask[:, :past] != 0
        if given.device.type == "cpu" and bool((given & ~valid[:, :past]).any()):
            row = int((given & ~valid[:, :past]).any(1).nonzero()[0])
            length = int(cache.lengths[row % cache.batch_size if index is None else index.contexts[row]])
            raise ValueError(f"`attention_mask` shows past tokens that row {row} does not hold: it has {length}")
        past_mask = given & valid[:, :past]
        spare = cache.columns - past
        if spare:
            past_mask = torch.cat([past_mask, past_mask.new_zeros(batch_size, spare)], dim=1)
        attention_mask = attention_mask[:, past:]
    return past_mask, token_mask(input_ids, attention_mask)


def in_order(output: ModelOutput, order: Tensor) -> ModelOutput:
    """The output of a forward with its rows in another order, int64 [batch]."""
    for name, value in list(output.items()):
        if isinstance(value, Tensor):
            output[name] = value[order.to(value.device)]
        elif isinstance(value, tuple):
            output[name] = tuple(x[order.to(x.device)] for x in value)
    return output


def has_gaps(mask: Tensor) -> Tensor:
    """Which rows of a mask, bool [batch, n], are padded on the left or have holes, bool [batch]."""
    return (mask[:, 1:] & ~mask[:, :-1]).any(1)
