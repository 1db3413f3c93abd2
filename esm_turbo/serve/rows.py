"""Rows of many requests in as few forwards as possible: what shares one is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.tasks.common.arms import log_probabilities

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache


@dataclass(frozen=True)
class Rows:
    """Rows of one request that extend one context.

    Attributes:
        key: equal for rows whose contexts are equal.
        context: a cache of one row.
        input_ids: int64 [n, width].
        at: index of the token in each row whose prediction is wanted, int64 [n].
        options: further arguments of the forward, each [n, ...].
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


def run_rows(turbo: ContextModel, parts: Sequence[Rows]) -> list[Tensor]:
    """Predictions of rows, in as few forwards as possible.

    Rows on the same context and of the same width share a forward. What does not fit into memory is halved.

    Args:
        parts: rows of any requests and contexts.

    Returns:
        For each part natural log-probabilities over the vocabulary, float32 [n, vocab_size], on the CPU.

    Raises:
        MemoryError, torch.OutOfMemoryError: a single row does not fit into memory.
    """
    together: dict[Hashable, list[int]] = {}
    for index, part in enumerate(parts):
        key = (part.key, part.input_ids.shape[1], frozenset(part.options))
        together.setdefault(key, []).append(index)
    results: dict[int, Tensor] = {}
    for own in together.values():
        joined = _join([parts[index] for index in own])
        predicted = _run(turbo, joined).split([len(parts[index]) for index in own])
        results |= dict(zip(own, predicted, strict=True))
    return [results[index] for index in range(len(parts))]


def _join(parts: Sequence[Rows]) -> Rows:
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        input_ids=torch.cat([part.input_ids for part in parts]),
        at=torch.cat([part.at for part in parts]),
        options={name: torch.cat([part.options[name] for part in parts]) for name in first.options},
    )


def _run(turbo: ContextModel, rows: Rows) -> Tensor:
    try:
        return log_probabilities(turbo, rows.input_ids, rows.at, past_key_values=rows.context, **rows.options)
    except Exception as error:
        if len(rows) == 1 or not is_out_of_memory(error):
            raise
        # It holds the frames of the failed run, and these its tensors.
        error.__traceback__ = None
    return torch.cat([_run(turbo, half) for half in rows.split(len(rows) // 2)])
