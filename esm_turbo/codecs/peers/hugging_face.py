"""The backends of Hugging Face's `QuantizedCache`, quanto and HQQ, as codecs.

Keys and values pass through `_quantize` of the backend's own cache layer, in groups of 64 consecutive components (or
the whole head if it is smaller), so that a group belongs to one token and head. The integers are packed like all codes
here; scale and zero are stored as the backend returns them, in float32 for models in float32. Requires the optional
extra `compare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.packing import pack_codes, unpack_codes
from esm_turbo.codecs.peers.data_free import DataFreeCodec
from esm_turbo.codecs.peers.integer import in_groups
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.extras import install_hint

_GROUP = 64


class QuantoCodec(DataFreeCodec):
    """optimum-quanto: x = scale code - shift."""

    layer_class = "QuantoQuantizedLayer"
    axis = 0
    allowed_bits: tuple[int, ...] = (2, 4)

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        if geometry.head_dim > _GROUP and geometry.head_dim % _GROUP:
            raise ValueError(f"`head_dim` must be at most {_GROUP} or a multiple of it, got {geometry.head_dim}")
        cls._new_layer(config, geometry)
        return {}

    @classmethod
    def _new_layer(cls, config: TurboConfig, geometry: Geometry) -> Any:
        from transformers import cache_utils

        group = min(_GROUP, geometry.head_dim)
        try:
            return getattr(cache_utils, cls.layer_class)(config.bits, cls.axis, cls.axis, group)
        except ImportError as error:
            raise ValueError(f"codec {config.codec!r} needs optional packages: {install_hint('compare')}") from error

    @cached_property
    def _layer(self) -> Any:
        return self._new_layer(self.config, self.geometry)

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        codes, ranges = self._groups(x.float().contiguous())
        codes = pack_codes(codes.reshape(x.shape), self.config.bits)
        return {f"{kind}_codes": codes, f"{kind}_ranges": ranges.reshape(*x.shape[:-1], -1)}

    def _groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8, and scale and shift of every group, [groups, 2]."""
        quantized = self._layer._quantize(x, self.axis)
        return quantized._data.unpack(), torch.cat([quantized._scale, quantized._shift], dim=1)

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        ranges = in_groups(packed[f"{kind}_ranges"].float(), 2)
        codes = unpack_codes(packed[f"{kind}_codes"], self.config.bits).float()
        groups = in_groups(codes, codes.shape[-1] // ranges.shape[-2])
        return self._value(groups, ranges[..., :1], ranges[..., 1:]).flatten(-2)

    def _value(self, codes: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return codes * scale - shift


class HqqCodec(QuantoCodec):
    """HQQ: x = scale (code - zero)."""

    layer_class = "HQQQuantizedLayer"
    axis = 1
    # The backend itself fails at three bits.
    allowed_bits = (1, 2, 4)

    def _groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = x.view(-1, min(_GROUP, x.shape[-1]))
        # The backend packs several groups together, without a remainder.
        padded = torch.cat([groups, groups.new_zeros(-len(groups) % 8, groups.shape[1])])
        layer = self._layer
        # The backend takes device and dtype from its own keys, which stay empty.
        layer.lazy_initialization(padded, padded)
        quantized, meta = layer._quantize(padded, self.axis)
        codes = layer.quantizer.unpack[meta["packing"]](quantized, dtype=torch.uint8)
        return codes[: len(groups)], torch.cat([meta["scale"], meta["zero"]], dim=1)[: len(groups)]

    def _value(self, codes: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (codes - shift) * scale
