"""Sign sketches: Lemmas 3.2 and 3.5 of QJL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esm_turbo.codecs.peers import jl
from tests.helpers.peer_codecs import unit


@pytest.mark.parametrize(("num_rows", "dim"), [(24, 24), (48, 24), (128, 64)])
@pytest.mark.parametrize("orthogonal", [False, True])
def test_sketch_variance(num_rows: int, dim: int, orthogonal: bool) -> None:
    """The variance is at most (pi / 2) |q|^2 |k|^2 / m, and less where rows are orthogonal."""
    query, key = 2 * unit(dim, seed=5), 4 * unit(dim, seed=6)
    found = []
    for seed in range(1500):
        make = jl.orthogonal_projection if orthogonal else jl.gaussian_projection
        projection = torch.from_numpy(make(num_rows, dim, seed)).float()
        gain = jl.orthogonal_gain(dim) if orthogonal else jl.GAUSSIAN_GAIN
        found.append(query @ jl.unsketch(projection, gain, *jl.sketch(projection, key)))
    errors = torch.stack(found) - query @ key
    bound = math.pi / 2 * 4 * 16 / num_rows
    assert abs(float(errors.mean())) < 4 * math.sqrt(bound / len(errors))
    assert 0.1 * bound < float(errors.var()) < (0.75 if orthogonal else 1.08) * bound


def test_orthogonal_rows():
    projection = jl.orthogonal_projection(48, 24, 0)
    for block in (projection[:24], projection[24:]):
        np.testing.assert_allclose(block @ block.T, np.eye(24), atol=1e-12)
    assert np.abs(projection[:24] @ projection[24:].T).max() > 0.1
    assert jl.orthogonal_gain(1024) == pytest.approx(math.sqrt(math.pi / 2 * 1024), rel=1e-3)
