"""fp8: eight-bit floating point (e4m3) with one scale per layer for keys and one for values, as in serving engines.

The scales map the largest magnitude of the calibration sample to the largest number of the format, 448; larger numbers
are clipped. A component takes exactly eight bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.base import KVCodec, Packed
from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.config import TurboConfig

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


class Fp8Codec(KVCodec):
    """e4m3 with calibrated scales."""

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        _, sample = statistics.select(config.protect_special_tokens)
        state = {}
        for kind, x in (("key", sample.keys), ("value", sample.values)):
            largest = np.abs(x).max(axis=(1, 2, 3)).astype(np.float32)
            state[f"{kind}_scale"] = torch.from_numpy(np.where(largest > 0, largest / _LARGEST, 1.0)[:, None]).float()
        return state

    def quantize(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        state = self.layer_state(layer_idx, keys.device)
        packed: Packed = {}
        for kind, x in (("key", keys), ("value", values)):
            # The format has no infinity: larger numbers would become NaN.
            scaled = (x / state[f"{kind}_scale"]).clamp(-_LARGEST, _LARGEST)
            packed[f"{kind}s"] = scaled.to(FP8).contiguous().view(torch.uint8)
        return packed

    def dequantize_keys(self, layer_idx: int, packed: Packed) -> Tensor:
        return packed["keys"].view(FP8).float() * self.layer_state(layer_idx, packed["keys"].device)["key_scale"]

    def dequantize_values(self, layer_idx: int, packed: Packed) -> Tensor:
        return packed["values"].view(FP8).float() * self.layer_state(layer_idx, packed["values"].device)["value_scale"]
