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

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        # The format has no infinity: larger numbers would become NaN.
        scaled = (x / self.layer_state(layer_idx, x.device)[f"{kind}_scale"]).clamp(-_LARGEST, _LARGEST)
        return {f"{kind}s": scaled.to(FP8).contiguous().view(torch.uint8)}

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        codes = packed[f"{kind}s"]
        return codes.view(FP8).float() * self.layer_state(layer_idx, codes.device)[f"{kind}_scale"]
