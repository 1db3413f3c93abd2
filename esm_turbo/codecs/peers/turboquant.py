"""TurboQuant (Zandieh et al. 2025, arXiv:2504.19874): norm, random rotation, one codebook for all components.

After a random rotation every component of a unit vector has the same known distribution, so that its Lloyd-Max codebook
needs no data (Algorithm 1, `mse`). The variant `prod` (Algorithm 2) spends one bit per component of a key on a sign
sketch of the residual, which makes scores unbiased. Values keep `mse`; the pseudocode that this project began with
sketches their residuals, too.

The rotation is a randomised Hadamard matrix, the same for all layers and heads. A vector takes head_dim * bits bits and
its norm in bfloat16, a `prod` key also the norm of its residual.
"""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import ArrayLike
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.packing import midpoints, pack_codes, quantize, unpack_codes
from esm_turbo.codecs.peers.data_free import DataFreeCodec, random_rotation, split_norm
from esm_turbo.codecs.peers.jl import GAUSSIAN_GAIN, gaussian_projection, sketch, unsketch
from esm_turbo.codecs.peers.sphere import sphere_levels
from esm_turbo.config import Geometry, TurboConfig


class TurboQuantCodec(DataFreeCodec):
    """Variant `mse`: least squared error."""

    allowed_bits: tuple[int, ...] = (1, 2, 3, 4, 5, 6)

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        return {**random_rotation(config, geometry), "levels": sphere_levels(geometry.head_dim, config.bits)}

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        levels = self.layer_state(layer_idx, x.device)["levels"]
        unit, norms = split_norm(x)
        codes = pack_codes(quantize(unit, midpoints(levels)), self.config.bits)
        return {f"{kind}_norms": norms, f"{kind}_codes": codes}

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        codes = packed[f"{kind}_codes"]
        levels = self.layer_state(layer_idx, codes.device)["levels"]
        return levels[unpack_codes(codes, self.config.bits).int()] * packed[f"{kind}_norms"].float()


class TurboQuantProdCodec(TurboQuantCodec):
    """Variant `prod`: unbiased scores."""

    allowed_bits = (2, 3, 4, 5, 6)

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        dim = geometry.head_dim
        return {
            **super().arrays(config, geometry),
            "key_levels": sphere_levels(dim, config.bits - 1),
            "projection": gaussian_projection(dim, dim, config.seed),
        }

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        if kind == "value":
            return super().pack(layer_idx, kind, x)
        state = self.layer_state(layer_idx, x.device)
        unit, norms = split_norm(x)
        codes = quantize(unit, midpoints(state["key_levels"]))
        residual = unit - state["key_levels"][codes.int()]
        packed = {"key_norms": norms, "key_codes": pack_codes(codes, self.config.bits - 1)}
        packed["key_signs"], packed["key_residual_norms"] = sketch(state["projection"], residual)
        return packed

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        if kind == "value":
            return super().unpack(layer_idx, kind, packed)
        state = self.layer_state(layer_idx, packed["key_codes"].device)
        unit = state["key_levels"][unpack_codes(packed["key_codes"], self.config.bits - 1).int()]
        unit = unit + unsketch(state["projection"], GAUSSIAN_GAIN, packed["key_signs"], packed["key_residual_norms"])
        return unit * packed["key_norms"].float()
