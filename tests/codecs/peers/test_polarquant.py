"""PolarQuant: relative errors that the implementation in Rust prints for one vector of 128 components."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esm_turbo.codecs.peers import sphere
from esm_turbo.config import TurboConfig
from tests.helpers.peer_codecs import assert_unbiased_scores, decoded, make_codec, relative_mse, unit


@pytest.mark.parametrize(("preset", "head_dim"), [("polarquant3", 64), ("polarquant4", 24)])
def test_sketched_scores_are_unbiased(preset: str, head_dim: int) -> None:
    assert_unbiased_scores(preset, head_dim)


@pytest.mark.parametrize(("bits", "printed", "tolerance"), [(2, 0.414, 0.16), (3, 0.238, 0.03), (4, 0.127, 0.06)])
def test_polarquant_error(bits: int, printed: float, tolerance: float) -> None:
    x = unit(1, 2, 1000, 128)
    _, values = decoded(make_codec(TurboConfig(codec="polarquant", bits=bits), 128), x)
    error = math.sqrt(relative_mse(x, values))
    assert error == pytest.approx(printed, rel=tolerance)
    # A uniform angle off by up to half a step, and radii of variance (2 - pi / 2) / 2 of the mean square.
    half = math.pi / 2**bits
    radii = sphere.rayleigh_levels(128, bits)
    grid = np.sqrt(-2 * np.log1p(-(np.arange(5000) + 0.5) / 5000) / 128)
    nearest = radii[np.abs(grid[:, None] - radii).argmin(1)]
    cross = (grid * nearest).mean() * 2 * (1 - math.sin(half) / half)
    expected = ((grid - nearest) ** 2).mean() + cross
    assert error == pytest.approx(math.sqrt(expected * 64), rel=0.01)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_radii_meet_lloyds_condition(bits: int) -> None:
    """Every level is the mean of its cell, here of samples of the law."""
    sample = np.linalg.norm(np.random.default_rng(0).standard_normal((200_000, 2)), axis=1) / math.sqrt(128)
    levels = sphere.rayleigh_levels(128, bits)
    cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, sample)
    means = [sample[cells == cell].mean() for cell in range(2**bits)]
    np.testing.assert_allclose(means, levels, atol=0.02 / math.sqrt(128))


def test_polarquant_angles_wrap():
    """Both sides of the cut at pi are neighbours."""
    codec = make_codec("polarquant4", 16, heads=1)
    for y in (1e-4, -1e-4, 0.0, -0.0):
        x = torch.tensor([-1.0, y]).repeat(8)[None, None, None] / math.sqrt(8)
        values = codec.unpack(0, "value", codec.quantize(0, x, x))
        angle = torch.atan2(values[..., 1], values[..., 0])
        assert float(angle.abs()) == pytest.approx(math.pi * 15 / 16, abs=1e-4)
