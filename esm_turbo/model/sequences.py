"""Attention of rows that hold several sequences, without a mask of all pairs of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def number_sequences(input_ids: Tensor, first_id: int) -> Tensor:
    """Number of each token's sequence in its row, int64 [batch, n], where every sequence begins with the same token."""
    return (input_ids == first_id).cumsum(1) - 1


@dataclass(frozen=True)
class SequenceBounds:
    """Where the sequences of every row begin and end.

    Attributes:
        rows: of each row, the bounds of its sequences, which follow each other.
    """

    rows: Sequence[Sequence[tuple[int, int]]]

    @classmethod
    def of(cls, chains: Tensor) -> SequenceBounds:
        """The bounds of sequences that are numbered along each row, -1 for padding; waits for a device.

        Args:
            chains: number of each token's sequence, integers [batch, n].
        """
        rows = []
        for numbers in chains.cpu().numpy():
            edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            rows.append([(a, b) for a, b in pairwise(edges) if numbers[a] >= 0])
        return cls(rows)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Row, first token and end of each sequence."""
        return ((row, begin, end) for row, bounds in enumerate(self.rows) for begin, end in bounds)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, to_earlier: bool) -> Tensor:
        """Attention of every sequence's tokens to each other, and optionally to all sequences before theirs.

        Args:
            query: scaled and after RoPE, [batch, heads, n, head_dim].
            keys: after RoPE, [batch, heads, n, head_dim].
            values: [batch, heads, n, head_dim].
            to_earlier: whether tokens see the sequences before their own in the row (block-causal attention).

        Returns:
            [batch, heads, n, head_dim]; 0 for padding.
        """
        output = torch.zeros_like(query)
        for row, begin, end in self:
            seen = slice(0 if to_earlier else begin, end)
            output[row : row + 1, :, begin:end] = scaled_dot_product_attention(
                query[row : row + 1, :, begin:end],
                keys[row : row + 1, :, seen],
                values[row : row + 1, :, seen],
                scale=1.0,
            )
        return output
