"""Spectral coefficients: which pairs are kept, and their bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from esm_turbo.codecs.peers.spectral import retained_energy
from tests.helpers.peer_codecs import make_codec, normal


def test_spectral_layers_keep_what_holds_the_energy() -> None:
    """Half of the pairs hold 99 % of the energy, in the mean over keys; of equal pairs almost all are needed."""
    concentrated = torch.where(torch.arange(128) % 64 < 32, 10.0, 1.0)
    kept = {}
    for name, std in (("concentrated", concentrated), ("equal", torch.ones(128))):
        codec = make_codec("spectral_layers", 128, channel_std=std)
        x = normal(1, 2, 200, 128) * std
        packed = codec.encode(0, x, x)
        kept[name] = packed["key_pairs"].shape[-1]
        energy = codec.decode(0, packed | {"key_scales": packed["key_scales"]})[0].square().sum(-1) / x.square().sum(-1)
        assert float(energy.mean()) == pytest.approx(0.95, abs=0.03)
    assert kept["concentrated"] < 32 < kept["equal"] < 64


def test_retained_energy_is_that_of_the_largest_pairs() -> None:
    share = retained_energy(torch.tensor([[3.0, 0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0]]).numpy())
    assert share[0].tolist() == pytest.approx([9 / 14, 13 / 14, 1, 1])


def keys_of_distinct_pairs(tokens: int, head_dim: int) -> Tensor:
    """Keys [1, 2, tokens, head_dim] of pairs of components whose energies are a tenth apart, in any order."""
    generator = torch.Generator().manual_seed(0)
    ranks, angles = torch.rand(2, 1, 2, tokens, head_dim // 2, generator=generator)
    lengths, angles = 1.05 ** ranks.argsort(-1), 2 * math.pi * angles
    return torch.cat([lengths * angles.cos(), lengths * angles.sin()], dim=-1)


@pytest.mark.parametrize(("head_dim", "kept"), [(16, 4), (24, 4), (32, 4), (64, 8), (128, 12)])
def test_spectral_keeps_the_pairs_of_most_energy(head_dim: int, kept: int) -> None:
    codec = make_codec("spectral", head_dim)
    x = keys_of_distinct_pairs(50, head_dim)
    packed = codec.encode(0, x, x)
    energy = x.unflatten(-1, (2, -1)).square().sum(-2)
    kept_energy = codec.decode(0, packed)[0].unflatten(-1, (2, -1)).square().sum(-2)
    assert packed["key_pairs"].shape[-1] == kept
    assert torch.equal(packed["key_pairs"].long().sort(-1).values, energy.topk(kept).indices.sort(-1).values)
    assert int((kept_energy > 0).sum(-1).max()) <= kept
    lost = energy.sort(-1).values[..., :-kept].sum(-1)
    total = (codec.decode(0, packed)[0] - x).square().sum(-1)
    # The rest is rounding, at most half a step of the largest coefficient over 7 in each of 2 F.
    rounding = 2 * kept * (x.abs().amax(-1) / 7 * 0.51).square()
    assert bool(((total >= lost - 1e-5) & (total <= lost + rounding)).all())
