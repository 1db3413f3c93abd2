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


def seen_in(scope: Scope) -> Tensor:
    """The tokens that each real token sees, bool [batch, 1, n, n]; padding sees itself."""
    query, key = CHAINS[:, None, :, None], CHAINS[:, None, None, :]
    seen = {Scope.ROW: key >= 0, Scope.SEQUENCE: query == key, Scope.PREFIX: (query >= key) & (key >= 0)}[scope]
    return torch.where(query >= 0, seen, query == key)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.scope.name)
def test_each_scope_sees_its_tokens(kind: LayerKind) -> None:
    real = CHAINS >= 0
    plan = plan_of(chains=CHAINS, attention_mask=real.long())
    query, keys, values = torch.randn(3, 2, 2, 7, 4)
    found = plan.attend(KINDS.index(kind), query, keys, values).transpose(1, 2)[real]
    expected = scaled_dot_product_attention(query, keys, values, attn_mask=seen_in(kind.scope), scale=1.0)
    torch.testing.assert_close(found, expected.transpose(1, 2)[real], rtol=0, atol=1e-6)


@pytest.mark.parametrize("extends", [False, True])
def test_padding_of_one_sequence_per_row_is_not_seen(extends: bool) -> None:
    real = CHAINS >= 0
    plan = plan_of(**({"seen": real} if extends else {"attention_mask": real.long()}))
    assert plan.bounds is None and plan.mask is not None
    assert torch.equal(plan.mask[:, 0, 0], real)
    assert plan_of().mask is None


def test_sessions_know_stored_layers_alone() -> None:
    session = Recorder()
    plan = plan_of(chains=CHAINS, session=session)
    query, keys, values = torch.randn(3, 2, 2, 7, 4)
    outputs = [plan.attend(layer, query, keys, values) for layer in range(3)]
    assert session.layers == [0, 1]
    assert plan.session_at(0) is None and plan.session_at(1) is session
    # What a session leaves to the model is attention to what the layer sees.
    alone = plan_of(chains=CHAINS)
    assert all(torch.equal(x, alone.attend(layer, query, keys, values)) for layer, x in enumerate(outputs))


def test_packed_tokens_attend_by_layer() -> None:
    class Doubled(Recorder):
        def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.layers.append(layer_idx)
            return 2 * values

    plan = plan_of(chains=CHAINS, session=Doubled())
    attend = attention_to_cache(plan, 2)
    qkv = torch.randn(14, 3, 2, 4)
    query, keys, values = qkv.view(2, 7, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
    within = plan_of(chains=CHAINS).attend(0, query, keys, values)
    assert torch.equal(attend(0, qkv), within.transpose(1, 2).reshape(14, 8))
    assert torch.equal(attend(1, qkv), 2 * qkv[:, 2].flatten(1))
    assert plan.session.layers == [0]
