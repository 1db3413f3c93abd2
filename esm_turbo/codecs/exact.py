"""Full precision: the frozen reference against which quantisation is measured."""

from __future__ import annotations

from torch import Tensor

from esm_turbo.codecs.base import KVCodec, Packed
from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.config import TurboConfig


class ExactCodec(KVCodec):
    """Keys and values in the model's dtype, unchanged."""

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        return {}

    def transform(
        self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return keys, values

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        return {f"{kind}s": x.contiguous()}

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        return packed[f"{kind}s"].float()
