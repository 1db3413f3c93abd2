"""Rows of many requests in as few forwards as possible: what shares one is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.tasks.common.forwards import log_probabilities

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


@dataclass(frozen=True)
class Rows:
    """Rows of one request that extend one context.

    Attributes:
        key: equal for rows whose contexts are equal.
        context: a cache of one row.
        input_ids: int64 [n, width].
        at: index of the token in each row whose prediction is wanted, int64 [n].
        options: none, or `attention_mask` and `position_ids` of the forward.
    """

    key: Hashable
    context: TurboKVCache
    input_ids: Tensor
    at: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    def split(self, count: int) -> tuple[Rows, Rows]:
        """The first `count` rows, and the others."""
        parts = (slice(None, count), slice(count, None))
        first, second = (
            replace(
                self,
                input_ids=self.input_ids[part],
                at=self.at[part],
                options={name: x[part] for name, x in self.options.items()},
            )
            for part in parts
        )
        return first, second


def run_rows(turbo: ContextModel, parts: Sequence[Rows]) -> Iterator[tuple[int, Tensor]]:
    """Yield the predictions of rows as soon as they are there, in as few forwards as possible.

    Rows of the same width share a forward, whatever their contexts, if these are stored alike; where graphs are
    replayed, only those of one context do. What does not fit into memory is halved.

    Args:
        parts: rows of any requests and contexts.

    Yields:
        For each part once its index, and natural log-probabilities over the vocabulary, float32 [n, vocab_size], on the
        CPU.

    Raises:
        MemoryError, torch.OutOfMemoryError: a single row does not fit into memory.
    """
    together: dict[Hashable, list[int]] = {}
    # A graph per context takes the host less time than putting several together and launching every kernel.
    in_turn = turbo.model.base_model.replays
    for index, part in enumerate(parts):
        key = (part.input_ids.shape[1], frozenset(part.options), part.context.config)
        together.setdefault((key, part.key if in_turn else None), []).append(index)
    for own in together.values():
        predicted = _run(turbo, [parts[index] for index in own]).split([len(parts[index]) for index in own])
        yield from zip(own, predicted, strict=True)


def _run(turbo: ContextModel, parts: Sequence[Rows]) -> Tensor:
    """Predictions of all rows, [n, vocab_size], in one forward if memory permits."""
    try:
        return _forward(turbo, parts)
    except Exception as error:
        if sum(map(len, parts)) == 1 or not is_out_of_memory(error):
            raise
        # It holds the frames of the failed run, and these its tensors.
        error.__traceback__ = None
    if len(parts) == 1:
        parts = parts[0].split(len(parts[0]) // 2)
    middle = len(parts) // 2
    return torch.cat([_run(turbo, half) for half in (parts[:middle], parts[middle:])])


def _forward(turbo: ContextModel, parts: Sequence[Rows]) -> Tensor:
    numbers: dict[Hashable, int] = {}
    for part in parts:
        numbers.setdefault(part.key, len(numbers))
    contexts = [next(part.context for part in parts if part.key == key) for key in numbers]
    options: dict[str, Any] = {"past_key_values": contexts[0]}
    masks = [part.options.get("attention_mask") for part in parts]
    if len(contexts) > 1:
        options["past_key_values"] = cache = TurboKVCache.cat(contexts)
        options["context_index"] = [numbers[part.key] for part in parts for _ in range(len(part))]
        masks = [mask if mask is None else _widened(mask, part, cache) for mask, part in zip(masks, parts, strict=True)]
    if "attention_mask" in parts[0].options:
        options["attention_mask"] = torch.cat([mask for mask in masks if mask is not None])
        options["position_ids"] = torch.cat([part.options["position_ids"] for part in parts])
    input_ids, at = torch.cat([part.input_ids for part in parts]), torch.cat([part.at for part in parts])
    return log_probabilities(turbo, input_ids, at, **options)


def _widened(mask: Tensor, part: Rows, cache: TurboKVCache) -> Tensor:
    """The mask of rows for a cache of more columns than their own context has."""
    own = part.context.get_seq_length()
    padding = mask.new_zeros(len(part), cache.get_seq_length() - own)
    return torch.cat([mask[:, :own], padding, mask[:, own:]], dim=1)
