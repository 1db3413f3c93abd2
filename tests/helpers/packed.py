"""Packed tokens and plans of layers that all attend to rows, for encoders run by hand."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from esm_turbo.model.packing import Attend, Packing, attention_of_rows
from esm_turbo.model.plan import ForwardPlan, LayerKind, PackedTokens, Rotary
from esm_turbo.model.sessions import KVSession
from tests.helpers import torch_encoder

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


def run_packed(
    encoder: Any,
    ids: Tensor,
    mask: Tensor,
    *,
    session: KVSession | None = None,
    layers: Collection[int] = (),
    ops: ModuleType = torch_encoder,
) -> tuple[Packing, Tensor, dict[int, Tensor]]:
    """A batch's packing, last hidden states, and states of some layers, [T, hidden_size], by plain operations."""
    packing = Packing.of(mask.sum(1).tolist(), ids.shape[1], ids.device)
    embeddings = packing.pack(encoder.embed(ids, mask.bool(), None))
    attend = attention_of_rows(packing, ops, plan_with(session))
    tokens = packed_tokens(embeddings, packing.positions, encoder.rotary_frequencies, attend, layers)
    return packing, *encoder.run_packed(tokens, ops)


class Recorder(KVSession):
    """Keeps the keys and values of every layer, and leaves attention to the model."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        assert layer_idx == len(self.seen)
        self.seen.append((keys.clone(), values.clone()))
