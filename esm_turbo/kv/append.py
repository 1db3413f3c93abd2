"""Tokens that are being appended to a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from esm_turbo.codecs import Packed


@dataclass
class Append:
    """New tokens of a cache: encoded layer by layer (`TurboKVCache.stage`), stored all at once (`commit`).

    Attributes:
        order: per row the new tokens that are kept, in order, then the others as padding, [batch, n].
        counts: number of tokens kept per row, [batch].
        token_ids: of the tokens as ordered, uint8 [batch, n].
        positions: of the tokens as ordered, int32 [batch, n], or None for each row's next ones.
        protected: per slot the ordered token that it protects, -1 for none, [batch, slots].
        layers: per layer the packed tokens, the protected tokens, and what is stored per row.
        counters: scratch of the backend, see `KVBackend.new_counters`; made when first needed.
    """

    order: Tensor
    counts: Tensor
    token_ids: Tensor
    positions: Tensor | None
    protected: Tensor
    layers: list[tuple[Packed, Packed, Packed]] = field(default_factory=list)
    counters: Tensor | None = None

    def layer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was encoded, by the names of a cache's tensors."""
        for index, (packed, protected, rows) in enumerate(self.layers):
            for group, tensors in (("packed", packed), ("protected", protected), ("rows", rows)):
                for name, tensor in tensors.items():
                    yield f"layers.{index}.{group}.{name}", tensor
