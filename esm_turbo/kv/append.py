"""Tokens that are being appended to a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from esm_turbo.kv.layer import TurboCacheLayer


class NewTokens(NamedTuple):
    """What the host knows of new tokens, for which a device need not be waited for.

    Attributes:
        skips: whether a token is left out before one that is stored, which stays at the position where it was computed.
        maybe_empty: whether rows may store none.
        specials: most of the tokens that any row stores that may be protected; None if that is not known.
    """

    skips: bool = False
    maybe_empty: bool = False
    specials: int | None = None


NO_GAPS = NewTokens()


@dataclass
class Append:
    """New tokens of a cache: encoded layer by layer (`TurboKVCache.stage`), stored all at once (`commit`).

    Attributes:
        lengths: of the cache that it was started for; another tensor once that has changed.
        order: per row the new tokens that are kept, in order, then the others as padding, [batch, n].
        counts: number of tokens kept per row, [batch].
        token_ids: of the tokens as ordered, uint8 [batch, n].
        positions: of the tokens as ordered, int32 [batch, n], or None for each row's next ones.
        chains: of the tokens as ordered, int32 [batch, n], or None where all of a row are one chain.
        protected: per slot the ordered token that it protects, -1 for none, [batch, slots].
        protects: whether tokens may be protected.
        specials: most of them that any row has.
        maybe_empty: see `NewTokens`.
        layers: what is stored of them in each layer that has been encoded.
        counters: scratch of the backend, see `KVBackend.new_counters`; made when first needed.
    """

    lengths: Tensor
    order: Tensor
    counts: Tensor
    token_ids: Tensor
    positions: Tensor | None
    protected: Tensor
    chains: Tensor | None = None
    protects: bool = False
    specials: int = 0
    maybe_empty: bool = False
    layers: list[TurboCacheLayer] = field(default_factory=list)
    counters: Tensor | None = None
