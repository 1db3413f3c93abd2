"""Packed tokens and plans of layers that all attend to rows, for encoders run by hand."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from esm_turbo.model.packing import Attend
from esm_turbo.model.plan import ForwardPlan, LayerKind, PackedTokens, Rotary
from esm_turbo.model.sessions import KVSession

_KINDS = (LayerKind(),) * 64


def packed_tokens(
    embeddings: Tensor, positions: Tensor, inv_freq: Tensor, attend: Attend, layers: Collection[int] = ()
) -> PackedTokens:
    """Tokens [T, hidden_size] at positions [T]."""
    rotary = Rotary(_KINDS, lambda kind: inv_freq, lambda scope: positions)
    return PackedTokens(embeddings, rotary, attend, layers)


def plan_with(session: KVSession | None) -> ForwardPlan:
    """The plan of a forward that shows queries, keys and values to a session."""
    return ForwardPlan(_KINDS, lambda kind: torch.zeros(0), session=session)
