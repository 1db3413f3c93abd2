"""Packed tokens of rows, for encoders run by hand."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from esm_turbo.model.plan import Attend, LayerKind, PackedTokens, Rotary

_MOST_LAYERS = 64


def packed_tokens(
    embeddings: Tensor, positions: Tensor, inv_freq: Tensor, attend: Attend, layers: Collection[int] = ()
) -> PackedTokens:
    """Tokens [T, hidden_size] at positions [T], in layers that all attend to rows."""
    rotary = Rotary((LayerKind(),) * _MOST_LAYERS, lambda kind: inv_freq, lambda scope: positions)
    return PackedTokens(embeddings, rotary, attend, layers)
