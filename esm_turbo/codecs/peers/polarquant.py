"""PolarQuant with a sign sketch of a key's residual: a random rotation, then pairs of components as angle and radius.

After a random rotation the angle of a pair is uniform and its radius follows the Rayleigh distribution of scale
head_dim^(-1/2): uniform angles and one Lloyd-Max table of radii need no data, and a vector stores one norm (bfloat16).
Angle and radius take `bits` bits each. As in an open implementation in Rust, keys add a Gaussian sign sketch of the
residual, with a quarter as many projections as components (in whole bytes), and the residual's norm. The constant of
the estimate is sqrt(pi / 2), which makes it unbiased (`jl`); that implementation uses pi / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.packing import GROUP_SIZE, midpoints, pack_codes, quantize, unpack_codes
from esm_turbo.codecs.peers.data_free import DataFreeCodec, random_rotation, split_norm
from esm_turbo.codecs.peers.jl import GAUSSIAN_GAIN, gaussian_projection, sketch, unsketch
from esm_turbo.codecs.peers.sphere import rayleigh_levels
from esm_turbo.config import Geometry, TurboConfig


class PolarQuantCodec(DataFreeCodec):
    """Angles and radii of pairs of components."""

    allowed_bits = (2, 3, 4, 5, 6)

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        quarter = geometry.head_dim // 4
        num_projections = -(-quarter // GROUP_SIZE) * GROUP_SIZE
        return {
            **random_rotation(config, geometry),
            "radii": rayleigh_levels(geometry.head_dim, config.bits),
            "projection": gaussian_projection(num_projections, geometry.head_dim, config.seed),
        }

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        state = self.layer_state(layer_idx, x.device)
        unit, norms = split_norm(x)
        packed = {f"{kind}_norms": norms, f"{kind}_codes": self._encode_unit(state["radii"], unit)}
        if kind == "key":
            residual = unit - self._decode_unit(state["radii"], packed["key_codes"])
            packed["key_signs"], packed["key_residual_norms"] = sketch(state["projection"], residual)
        return packed

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        codes = packed[f"{kind}_codes"]
        state = self.layer_state(layer_idx, codes.device)
        unit = self._decode_unit(state["radii"], codes)
        if kind == "key":
            signs, norms = packed["key_signs"], packed["key_residual_norms"]
            unit = unit + unsketch(state["projection"], GAUSSIAN_GAIN, signs, norms)
        return unit * packed[f"{kind}_norms"].float()

    def _encode_unit(self, radii: Tensor, unit: Tensor) -> Tensor:
        """Codes of all angles, then of all radii; pairs are (2 i, 2 i + 1)."""
        x, y = unit[..., ::2], unit[..., 1::2]
        steps = (torch.atan2(y, x) + math.pi) * (2**self.config.bits / (2 * math.pi))
        # An angle of exactly pi wraps around to -pi.
        angles = steps.floor().to(torch.int32) % 2**self.config.bits
        lengths = quantize((x.square() + y.square()).sqrt(), midpoints(radii))
        return pack_codes(torch.cat([angles.to(torch.uint8), lengths], dim=-1), self.config.bits)

    def _decode_unit(self, radii: Tensor, packed: Tensor) -> Tensor:
        angles, lengths = unpack_codes(packed, self.config.bits).chunk(2, dim=-1)
        angle = (angles.float() + 0.5) * (2 * math.pi / 2**self.config.bits) - math.pi
        return torch.stack([angle.cos(), angle.sin()], dim=-1).mul(radii[lengths.int()][..., None]).flatten(-2)
