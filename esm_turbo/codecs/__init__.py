"""Codecs: compressed storage formats for keys and values, behind one interface."""

from __future__ import annotations

from functools import lru_cache

from esm_turbo.codecs.base import FieldSlab, KVCodec, Packed, PackedContext
from esm_turbo.codecs.exact import ExactCodec
from esm_turbo.codecs.lut import LutCodec
from esm_turbo.codecs.peers.data_free import DataFreeCodec
from esm_turbo.codecs.peers.fp8 import Fp8Codec
from esm_turbo.codecs.peers.hybrid import HybridCodec
from esm_turbo.codecs.peers.integer import Int4Codec, Int8Codec
from esm_turbo.codecs.peers.kivi import KiviCodec
from esm_turbo.codecs.peers.polarquant import PolarQuantCodec
from esm_turbo.codecs.peers.qjl import QjlCodec, QjlOutlierCodec
from esm_turbo.codecs.peers.spectral import Spectral8Codec, SpectralCodec, SpectralLayersCodec
from esm_turbo.codecs.peers.turboquant import TurboQuantCodec, TurboQuantProdCodec
from esm_turbo.codecs.turbo import TurboCodec
from esm_turbo.config import Geometry, TurboConfig

CODECS: dict[str, type[KVCodec]] = {
    "exact": ExactCodec,
    "lut": LutCodec,
    "turbo": TurboCodec,
    "fp8": Fp8Codec,
    "hybrid": HybridCodec,
    "int4": Int4Codec,
    "int8": Int8Codec,
    "kivi": KiviCodec,
    "polarquant": PolarQuantCodec,
    "qjl": QjlCodec,
    "qjl_outliers": QjlOutlierCodec,
    "spectral": SpectralCodec,
    "spectral8": Spectral8Codec,
    "spectral_layers": SpectralLayersCodec,
    "turboquant": TurboQuantCodec,
    "turboquant_prod": TurboQuantProdCodec,
}

__all__ = [
    "CODECS",
    "DataFreeCodec",
    "ExactCodec",
    "FieldSlab",
    "KVCodec",
    "LutCodec",
    "Packed",
    "PackedContext",
    "TurboCodec",
    "codec_class",
    "codec_without_calibration",
]


def codec_class(config: TurboConfig) -> type[KVCodec]:
    """The codec class named by `config`.

    Raises:
        ValueError: no codec has that name.
    """
    if config.codec not in CODECS:
        raise ValueError(f"`codec` must be one of {sorted(CODECS)}, got {config.codec!r}")
    return CODECS[config.codec]


@lru_cache(maxsize=32)
def codec_without_calibration(config: TurboConfig, geometry: Geometry) -> KVCodec | None:
    """The codec for these options if it needs no calibration, else None.

    Raises:
        ValueError: no codec has that name, or it does not support these options or this geometry.
    """
    cls = codec_class(config)
    if issubclass(cls, ExactCodec):
        return cls(config, geometry, {})
    if issubclass(cls, DataFreeCodec):
        return cls(config, geometry, cls.state_for(config, geometry))
    return None
