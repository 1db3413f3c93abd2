"""Tokens that are being appended to a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from esm_turbo.kv.layer import TurboCacheLayer


@dataclass
class Append:
    """New tokens of a cache: encoded layer by layer (`TurboKVCache.stage`), stored all at once (`commit`).

    Attributes:
        order: per row the new tokens that are kept, in order, then the others as padding, [batch, n].
        counts: number of tokens kept per row, [batch].
        token_ids: of the tokens as ordered, uint8 [batch, n].
        positions: of the tokens as ordered, int32 [batch, n], or None for each row's next ones.
        chains: of the tokens as ordered, int32 [batch, n], or None where all of a row are one chain.
        protected: per slot the ordered token that it protects, -1 for none, [batch, slots].
        protects: whether tokens may be protected.
        specials: most of them that any row has.
        layers: what is stored of them in each layer that has been encoded.
        counters: scratch of the backend, see `KVBackend.new_counters`; made when first needed.
    """

    order: Tensor
    counts: Tensor
    token_ids: Tensor
    positions: Tensor | None
    protected: Tensor
    chains: Tensor | None = None
    protects: bool = False
    specials: int = 0
    layers: list[TurboCacheLayer] = field(default_factory=list)
    counters: Tensor | None = None
