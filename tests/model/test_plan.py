"""What each layer of a plan sees, from where its positions count, and what is stored of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from esm_turbo.model.packing import attention_to_cache
from esm_turbo.model.plan import ForwardPlan, LayerKind, Scope
from esm_turbo.model.sessions import KVSession

KINDS = (LayerKind(Scope.SEQUENCE, rotary=1, stored=False), LayerKind(Scope.PREFIX), LayerKind(Scope.ROW))
# Two sequences and padding; three sequences.
CHAINS = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 0, 1, 1, 1, 2, 2]])


def frequencies(kind: LayerKind) -> Tensor:
    return torch.tensor([1.0, 0.25]) if kind.rotary else torch.tensor([0.5, 0.125])


def plan_of(**fields: Any) -> ForwardPlan:
    return ForwardPlan(KINDS, frequencies, torch.zeros(2, 7, dtype=torch.int64), **fields)


class Recorder(KVSession):
    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.layers.append(layer_idx)


def test_positions_begin_anew_in_each_sequence() -> None:
    assert plan_of().positions_at(Scope.ROW).tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    within = plan_of(chains=CHAINS).positions_at(Scope.SEQUENCE)
    assert within[0, :6].tolist() == [0, 1, 2, 0, 1, 2]
    assert within[1].tolist() == [0, 1, 0, 1, 2, 0, 1]
    # Tokens that were left out leave gaps, and a query begins after its context.
    positions = torch.tensor([[10, 12, 13, 14, 15, 17, 18]])
    plan = plan_of(positions=positions, chains=CHAINS)
    assert plan.positions_at(Scope.PREFIX).tolist() == positions.tolist()
    assert plan.positions_at(Scope.SEQUENCE)[1].tolist() == [0, 2, 0, 1, 2, 0, 1]
    assert plan_of(positions=positions).positions_at(Scope.SEQUENCE).tolist() == [[0, 2, 3, 4, 5, 7, 8]]


def test_each_kind_of_layer_has_its_angles() -> None:
    plan = plan_of(chains=CHAINS)
    for layer, kind in enumerate(KINDS):
        cos, sin = plan.rotary.at(layer, torch.device("cpu"))
        angle = (plan.positions_at(kind.scope)[..., None] * frequencies(kind)).repeat(1, 1, 2)
        assert torch.equal(cos, angle.cos()) and torch.equal(sin, angle.sin())
        # Layers of a kind share them.
        assert plan.rotary.at(layer, torch.device("cpu"))[0] is cos


@pytest.mark.parametrize("extends", [False, True])
def test_each_scope_sees_its_tokens(extends: bool) -> None:
    real = CHAINS >= 0
    plan = plan_of(chains=CHAINS, **({"seen": real} if extends else {"attention_mask": real.long()}))
    for scope in Scope:
        mask = plan.mask_at(scope)
        assert mask is not None
        found = mask.expand(2, 1, 7, 7)[:, 0]
        for row, chains in enumerate(CHAINS.tolist()):
            for query, own in enumerate(chains):
                if own < 0:
                    continue
                sees = {
                    Scope.ROW: [key >= 0 for key in chains],
                    Scope.SEQUENCE: [key == own for key in chains],
                    Scope.PREFIX: [0 <= key <= own for key in chains],
                }[scope]
                assert found[row, query].tolist() == sees
    assert all(plan_of().mask_at(scope) is None for scope in Scope)


def test_sessions_know_stored_layers_alone() -> None:
    session = Recorder()
    plan = plan_of(chains=CHAINS, session=session)
    query, keys, values = torch.randn(3, 2, 2, 7, 4)
    outputs = [plan.attend(layer, query, keys, values) for layer in range(3)]
    assert session.layers == [0, 1]
    assert plan.session_at(0) is None and plan.session_at(1) is session
    # What a session leaves to the model is attention to what the layer sees.
    for output, kind in zip(outputs, KINDS, strict=True):
        mask = plan.mask_at(kind.scope)
        assert torch.equal(output, scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0))


def test_packed_tokens_attend_by_layer() -> None:
    class Doubled(Recorder):
        def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.layers.append(layer_idx)
            return 2 * values

    plan = plan_of(chains=CHAINS, session=Doubled())
    attend = attention_to_cache(plan, 2)
    qkv = torch.randn(14, 3, 2, 4)
    query, keys, values = qkv.view(2, 7, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
    within = scaled_dot_product_attention(query, keys, values, attn_mask=plan.mask_at(Scope.SEQUENCE), scale=1.0)
    assert torch.equal(attend(0, qkv), within.transpose(1, 2).reshape(14, 8))
    assert torch.equal(attend(1, qkv), 2 * qkv[:, 2].flatten(1))
    assert plan.session.layers == [0]
