"""One layer of a cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from esm_turbo.codecs import Packed

_WRITTEN_BY = "a TurboKVCache is written by a forward of a TurboEsm model with use_cache=True"


class TurboCacheLayer(CacheLayerMixin):
    """The stored tensors of one layer of a cache.

    Attributes:
        packed: stored by the codec per token, tensors [batch, heads, columns, ...].
        protected: transformed keys and values of protected tokens, bfloat16 [batch, heads, slots, head_dim].
        rows: stored by the codec per row, tensors [batch, heads, 1, ...].
    """

    is_compileable = False
    is_sliding = False

    def __init__(
        self, packed: Packed | None = None, protected: Packed | None = None, rows: Packed | None = None
    ) -> None:
        super().__init__()
        self.packed, self.protected, self.rows = packed or {}, protected or {}, rows or {}

    @property
    def columns(self) -> int:
        return next(iter(self.packed.values())).shape[2] if self.packed else 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError(_WRITTEN_BY)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(_WRITTEN_BY)
