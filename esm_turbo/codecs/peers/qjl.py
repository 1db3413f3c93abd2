"""QJL (Zandieh, Daliri and Han 2024, arXiv:2406.03482): keys as signs of random projections, values as integers.

A key stores `bits` signs per component, of projections orthogonalised as in section 4 of the paper, and its norm in
bfloat16; scores are unbiased (see `jl`). Values are quantised per token to `bits` bits in groups (`integer`). The
paper's separate treatment of a few outlier channels of language models is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import ArrayLike
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.peers.data_free import DataFreeCodec
from esm_turbo.codecs.peers.integer import pack_asymmetric, unpack_asymmetric
from esm_turbo.codecs.peers.jl import orthogonal_gain, orthogonal_projection, sketch, unsketch
from esm_turbo.config import Geometry, TurboConfig


class QjlCodec(DataFreeCodec):
    """Sign sketches of keys, integers for values."""

    allowed_bits = (1, 2, 3, 4, 5, 6)

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        dim = geometry.head_dim
        return {"projection": orthogonal_projection(config.bits * dim, dim, config.seed)}

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        if kind == "key":
            signs, norms = sketch(self.layer_state(layer_idx, x.device)["projection"], x)
            return {"key_signs": signs, "key_norms": norms}
        codes, ranges = pack_asymmetric(x, self.config.bits)
        return {"value_codes": codes, "value_ranges": ranges}

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        if kind == "value":
            return unpack_asymmetric(packed["value_codes"], packed["value_ranges"], self.config.bits)
        projection = self.layer_state(layer_idx, packed["key_signs"].device)["projection"]
        gain = orthogonal_gain(self.geometry.head_dim)
        return unsketch(projection, gain, packed["key_signs"], packed["key_norms"])
