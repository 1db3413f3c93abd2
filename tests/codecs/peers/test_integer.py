"""Symmetric and asymmetric integers: errors of half a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.codecs.peers.integer import pack_asymmetric, unpack_asymmetric
from tests.helpers.peer_codecs import decoded, make_codec, normal


@pytest.mark.parametrize(("preset", "limit"), [("int8", 127), ("int4", 7)])
def test_symmetric_integers_are_off_by_half_a_step(preset: str, limit: int) -> None:
    x = normal(1, 2, 100, 64)
    for other in decoded(make_codec(preset, 64), x):
        # A scale rounded to bfloat16 may cut off two thousandths of the largest component.
        step = x.abs().amax(-1, keepdim=True) / limit
        assert bool(((x - other).abs() <= 0.502 * step + 0.002 * step * limit).all())
        assert float(((x - other).abs() / step).max()) > 0.49


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 7]), st.sampled_from([8, 24, 32, 96]), st.floats(-100, 100))
def test_asymmetric_integers_are_off_by_half_a_step(seed: int, bits: int, dim: int, shift: float) -> None:
    x = normal(3, dim, seed=seed) + shift
    other = unpack_asymmetric(*pack_asymmetric(x, bits), bits)
    groups = x.unflatten(-1, (-1, 32 if dim % 32 == 0 else dim))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (groups - other.view_as(groups)).abs().amax(-1)
    # Zero and range are rounded to eleven bits.
    assert bool((error <= 0.51 * step + 2**-10 * (groups.abs().amax(-1) + step * 2**bits)).all())


def test_asymmetric_groups_are_apart():
    x = torch.cat([torch.zeros(1, 32), torch.linspace(0, 1000, 32)[None]], dim=-1)
    other = unpack_asymmetric(*pack_asymmetric(x, 2), 2)
    assert torch.equal(other[:, :32], x[:, :32])
