"""Codecs: ways of storing keys and values in few bits, behind one interface."""

from __future__ import annotations

from ..config import TurboConfig
from .base import KVCodec, Packed, PackedContext
from .exact import ExactCodec
from .lut import LutCodec
from .turbo import TurboCodec

CODECS: dict[str, type[KVCodec]] = {"exact": ExactCodec, "lut": LutCodec, "turbo": TurboCodec}

__all__ = ["CODECS", "ExactCodec", "KVCodec", "LutCodec", "Packed", "PackedContext", "TurboCodec", "codec_class"]


def codec_class(config: TurboConfig) -> type[KVCodec]:
    """The codec that `config` names.

    Raises:
        ValueError: there is no codec of that name.
    """
    if config.codec not in CODECS:
        raise ValueError(f"`codec` must be one of {sorted(CODECS)}, got {config.codec!r}")
    return CODECS[config.codec]
