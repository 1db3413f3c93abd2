"""Codebooks of unit vectors: Lloyd's conditions on samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from esm_turbo.codecs.peers import sphere


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [16, 24, 128])
def test_codebooks_meet_lloyds_conditions(dim: int, bits: int) -> None:
    """Every level is the mean of its cell, here of the law's samples."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((100_000, dim))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    gaussian_pairs = rng.standard_normal((200_000, 2)) / math.sqrt(dim)
    for levels, sample in (
        (sphere.sphere_levels(dim, bits), vectors[:, 0]),
        (sphere.rayleigh_levels(dim, bits), np.linalg.norm(gaussian_pairs, axis=1)),
    ):
        cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, sample)
        means = np.array([sample[cells == cell].mean() for cell in range(2**bits)])
        np.testing.assert_allclose(means, levels, atol=0.02 / math.sqrt(dim))
    np.testing.assert_array_equal(sphere.sphere_levels(dim, bits), -sphere.sphere_levels(dim, bits)[::-1])
    assert np.abs(vectors[:, 0]).mean() == pytest.approx(sphere.mean_absolute_component(dim), rel=0.01)
