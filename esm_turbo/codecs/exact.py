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

    def quantize(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        return {"keys": keys.contiguous(), "values": values.contiguous()}

    def dequantize_keys(self, layer_idx: int, packed: Packed) -> Tensor:
        return packed["keys"].float()

    def dequantize_values(self, layer_idx: int, packed: Packed) -> Tensor:
        return packed["values"].float()
