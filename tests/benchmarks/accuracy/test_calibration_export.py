"""The shipped calibration in numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accuracy import calibration_export
from esm_turbo.codecs.fitting import transforms
from esm_turbo.codecs.fitting.transforms import Transform
from esm_turbo.config import PRESETS


def random_moments(seed: int, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Two positive definite matrices [1, 1, size, size]."""
    rng = np.random.default_rng(seed)
    roots = rng.standard_normal((2, 1, 1, size, size))
    covariance, cost = roots @ roots.swapaxes(-1, -2)
    return covariance, cost


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_costs_are_invariant_to_scale_and_least_in_the_query_aware_basis(seed: int) -> None:
    covariance, cost = random_moments(seed)
    rng = np.random.default_rng(seed + 1)
    basis = rng.standard_normal(covariance.shape)
    some = Transform(basis, np.linalg.inv(basis))
    scale = rng.uniform(0.1, 10, (1, 1, 6, 1))
    scaled = Transform(basis * scale, some.inverse / scale.swapaxes(-1, -2))
    costs = calibration_export.component_costs(some, covariance, cost)
    np.testing.assert_allclose(calibration_export.component_costs(scaled, covariance, cost), costs, rtol=1e-6)
    own = calibration_export.component_costs(transforms.query_aware(covariance, cost), covariance, cost)
    np.testing.assert_allclose(own.sum(), np.trace((covariance @ cost)[0, 0]), rtol=1e-6)
    determinant = np.linalg.det(covariance) * np.linalg.det(cost)
    np.testing.assert_allclose(own.prod(-1), determinant, rtol=1e-5)
    assert costs.prod() >= own.prod() * (1 - 1e-6)


def test_figures_of_the_shipped_calibration() -> None:
    [one] = calibration_export.cases()
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    for name in calibration_export.TURBO_PRESETS:
        keys, values = (np.array(row["widths"][name][kind]) for kind in ("key", "value"))
        assert keys.shape == values.shape == (12, 64)
        # The codes alone, of both.
        assert (keys.mean() + values.mean()) / 2 == pytest.approx(PRESETS[name].mean_bits, abs=0.13)
        assert ((keys >= 0) & (keys <= 8)).all()
        for kind, widths in (("key", keys), ("value", values)):
            grids = row["levels"][name][kind]
            assert set(grids) == {str(width) for width in np.unique(widths) if width}
            for width, grid in grids.items():
                assert len(grid) == 2 ** int(width)
                np.testing.assert_allclose(grid, -np.array(grid)[::-1], atol=1e-6)
    for kind in ("key", "value"):
        found = {name: np.array(spectrum) for name, spectrum in row["spectra"][kind].items()}
        assert {spectrum.shape for spectrum in found.values()} == {(12, 4, 64)}
        np.testing.assert_allclose(found["variance, svd"].sum(-1), found["variance, channels"].sum(-1), rtol=0.02)
        np.testing.assert_allclose(found["cost, turbo"].sum(-1), found["cost, svd"].sum(-1), rtol=0.02)
        # The first components are worth more.
        assert (found["cost, turbo"][..., :8].sum(-1) > found["cost, turbo"][..., 8:16].sum(-1)).all()
        assert all(ratio > 1 for ratios in row["outlier_ratios"][kind].values() for ratio in ratios)
