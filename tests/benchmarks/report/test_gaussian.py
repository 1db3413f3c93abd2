"""Distortions of quantisers of a unit Gaussian, against published figures and quadrature."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from benchmarks.report import gaussian
from benchmarks.report.gaussian import gaussian_lloyd_max


@pytest.mark.parametrize(("bits", "published"), [(0, 1.0), (1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.00950)])
def test_gaussian_distortion_is_the_published_one(bits, published):
    # Max's figures have three or four digits (1 bit is 1 - 2 / pi = 0.36338); ours to nine stand below.
    assert gaussian_lloyd_max(2**bits).distortion == pytest.approx(published, abs=2e-5)


@pytest.mark.parametrize(
    ("levels", "distortion"),
    [
        (2, 1 - 2 / np.pi),
        (4, 0.117481848),
        (8, 0.034547761),
        (16, 0.009501008),
        (32, 0.002504668),
        (64, 0.000644240),
    ],
)
def test_gaussian_distortion_digits(levels, distortion):
    assert gaussian_lloyd_max(levels).distortion == pytest.approx(distortion, abs=5e-10)


def test_eight_gaussian_levels():
    # Max 1960, table I, N = 8.
    np.testing.assert_allclose(gaussian_lloyd_max(8).levels[4:], [0.2451, 0.7560, 1.344, 2.152], atol=5e-4)
    np.testing.assert_allclose(gaussian_lloyd_max(8).boundaries[3:], [0, 0.5006, 1.050, 1.748], atol=5e-4)


@pytest.mark.parametrize("levels", [1, 2, 3, 7, 8, 33, 64, 255, 256])
def test_gaussian_conditions_by_quadrature(levels):
    quantiser = gaussian_lloyd_max(levels)
    np.testing.assert_array_equal(quantiser.boundaries, (quantiser.levels[1:] + quantiser.levels[:-1]) / 2)
    np.testing.assert_allclose(quantiser.levels, -quantiser.levels[::-1], atol=1e-15)
    edges = np.concatenate([[-12.0], quantiser.boundaries, [12.0]])
    distortion = 0.0
    for level, lower, upper in zip(quantiser.levels, edges[:-1], edges[1:], strict=True):
        mass = quad(norm.pdf, lower, upper, epsabs=0, epsrel=1e-11)[0]
        # First moment about the level: 0 where the level is the mean of its cell.
        first = quad(lambda x, c=level: (x - c) * norm.pdf(x), lower, level, epsabs=0, epsrel=1e-11)[0]
        first += quad(lambda x, c=level: (x - c) * norm.pdf(x), level, upper, epsabs=0, epsrel=1e-11)[0]
        assert abs(first) < 1e-9 * mass
        distortion += quad(lambda x, c=level: (x - c) ** 2 * norm.pdf(x), lower, upper, epsabs=0, epsrel=1e-11)[0]
    assert quantiser.distortion == pytest.approx(distortion, rel=1e-8)


def test_three_bits_and_a_sign():
    # By quadrature the mean absolute residual is 0.149594 and 0.0345478 - 0.149594^2 = 0.0121693.
    distortion, without_sign = gaussian.sign_of_residual(4)
    assert distortion == pytest.approx(0.0121693, abs=1e-7)
    assert without_sign == pytest.approx(0.0345478, abs=1e-7)
    # Worse than a fourth bit in the table.
    assert gaussian.lloyd_max(4)[0] < distortion
    assert gaussian.sign_of_residual(4, per_level=True)[0] < distortion


@pytest.mark.parametrize(
    ("bits", "published", "digit"),
    [(1, 0.3634, 1e-4), (2, 0.1188, 1e-4), (3, 0.03744, 1e-5), (4, 0.01154, 1e-5), (5, 0.003495, 1e-6)],
)
def test_evenly_spaced_levels(bits, published, digit):
    # Max 1960, table II; one unit in the last digit.
    assert gaussian.evenly_spaced(bits)[0] == pytest.approx(published, abs=digit)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("distortions", [gaussian.lloyd_max, gaussian.evenly_spaced])
def test_reading_without_the_last_bit(distortions, bits):
    """Worse than levels made for one bit less, and better than none at all."""
    assert distortions(bits - 1)[0] < distortions(bits)[1] < 1
