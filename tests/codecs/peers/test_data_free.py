"""Codecs without calibration: vectors as direction and norm."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.codecs.peers.data_free import divide, split_norm
from tests.helpers.peer_codecs import normal


@given(st.integers(0, 2**32 - 1), st.floats(-30, 30), st.sampled_from([1, 8, 24]))
def test_norm_and_direction(seed: int, exponent: float, dim: int) -> None:
    x = normal(4, dim, seed=seed) * 10.0**exponent
    direction, norm = split_norm(x)
    assert norm.dtype == torch.bfloat16
    torch.testing.assert_close(direction.norm(dim=-1), torch.ones(4), rtol=1e-5, atol=0)
    torch.testing.assert_close(direction * norm.float(), x, rtol=2**-8, atol=0)


def test_division_by_tiny_numbers():
    divisor = torch.tensor([0.0, 1e-40, 2.0, -1.0])
    assert torch.equal(divide(torch.ones(4), divisor), torch.tensor([0.0, 0.0, 0.5, 0.0]))
