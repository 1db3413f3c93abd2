"""TurboQuant: distortions measured on unit vectors with the open implementation, and the bounds of its paper."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.peer_codecs import (
    assert_unbiased_scores,
    decoded,
    make_codec,
    normal,
    relative_mse,
    stored_scores,
    unit,
)


@pytest.mark.parametrize(
    ("head_dim", "bits", "published"),
    [(64, 2, 0.114), (64, 3, 0.0333), (64, 4, 0.0092), (128, 2, 0.116), (128, 3, 0.0340), (128, 4, 0.0093)],
)
def test_turboquant_distortion(head_dim: int, bits: int, published: float) -> None:
    x = unit(1, 2, 1000, head_dim)
    for other in decoded(make_codec(f"turboquant{bits}", head_dim), x):
        distortion = relative_mse(x, other)
        assert distortion == pytest.approx(published, rel=0.02)
        assert 4.0**-bits < distortion < math.sqrt(3) * math.pi / 2 * 4.0**-bits


@pytest.mark.parametrize(
    ("preset", "head_dim"), [("turboquant_prod4", 64), ("turboquant_prod3", 64), ("turboquant_prod3", 24)]
)
def test_sketched_scores_are_unbiased(preset: str, head_dim: int) -> None:
    assert_unbiased_scores(preset, head_dim)


def test_prod_scores_are_the_published_estimate():
    """Read as a wider key, (R k quantised, signs), against (R q, S R q): the same numbers."""
    codec = make_codec("turboquant_prod3", 64, heads=1)
    keys, query = 2 * normal(1, 1, 30, 64), normal(1, 1, 4, 64, seed=1)
    packed = codec.encode(0, keys, keys)
    state = codec.layer_state(0, keys.device)
    rotated = query @ state["key_inverse"]
    norms, residual_norms = packed["key_norms"].float(), packed["key_residual_norms"].float()
    codes = packed["key_codes"]
    bits = torch.stack([codes >> 2 * shift & 3 for shift in range(4)], dim=-1).flatten(-2)
    signs = torch.stack([packed["key_signs"] >> shift & 1 for shift in range(8)], dim=-1).flatten(-2)
    wide_keys = torch.cat([state["key_levels"][bits.int()], residual_norms * (2.0 * signs - 1)], dim=-1) * norms
    projected = rotated @ state["projection"].T
    wide_query = torch.cat([rotated, math.sqrt(math.pi / 2) / 64 * projected], dim=-1)
    scores = stored_scores(codec, query, packed)
    torch.testing.assert_close(scores, wide_query @ wide_keys.mT, rtol=1e-4, atol=1e-4)
