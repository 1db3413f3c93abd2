"""Quantisers of samples against published figures, the Gaussian quantiser, exhaustive search and scikit-learn."""

import itertools
import warnings
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtri
from scipy.stats import norm
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from esm_turbo.codecs.fitting import lloyd_max as module
from esm_turbo.codecs.fitting.lloyd_max import (
    Magnitudes,
    _lloyd,
    _PrefixSums,
    _run_starts,
    gaussian_uniform,
    pooled_uniform_quantizer,
    uniform_quantizer,
)

# Distortions of the best quantisers of a unit Gaussian by levels, and the levels of eight (Max 1960, table I).
GAUSSIAN_DISTORTIONS = {1: 1.0, 2: 0.3634, 4: 0.1175, 8: 0.03454, 16: 0.009497, 32: 0.002499}
EIGHT_LEVELS = np.array([-2.152, -1.344, -0.7560, -0.2451, 0.2451, 0.7560, 1.344, 2.152])
# A midpoint rule in probability: mean squares of it are those of a Gaussian to 1e-5 or better.
GAUSSIAN_GRID = ndtri((np.arange(200_000) + 0.5) / 200_000)


def hard_samples():
    rng = np.random.default_rng(5)
    n = 4000
    bulk = rng.standard_normal(n)
    return {
        "gaussian": bulk,
        "laplace": rng.laplace(size=n),
        "uniform": rng.random(n),
        "student, 2 degrees": rng.standard_t(2, size=n),
        "cauchy": rng.standard_cauchy(n),
        "log-normal": np.exp(3 * bulk),
        "seven clusters": rng.normal(rng.integers(0, 7, n) * 3.0, 0.05),
        "planted x60": np.concatenate([bulk, 60 + rng.standard_normal(5)]),
        "planted x200": np.concatenate([bulk, [200.0, -200.0, 190.0]]),
        "thirty integers": rng.integers(0, 30, n).astype(np.float64),
        "mostly zero": np.where(rng.random(n) < 0.9, 0.0, bulk),
    }


HARD_SAMPLES = hard_samples()


def mean_squared_error(x, levels, weights=None):
    x, weights = np.ravel(x).astype(np.float64), None if weights is None else np.ravel(weights)
    middles = 0.5 * levels[1:] + 0.5 * levels[:-1]
    return np.average(np.square(x - levels[np.searchsorted(middles, x)]), weights=weights)


class Quantiser(NamedTuple):
    levels: np.ndarray
    distortion: float


def lloyd_max(x, levels, weights=None):
    """The levels, and their mean squared error on the sample."""
    found = module.lloyd_max(x, levels, weights)
    return Quantiser(found, mean_squared_error(x, found, weights))


def assert_is_quantiser(quantiser, levels):
    assert quantiser.levels.shape == (levels,)
    assert quantiser.levels.dtype == np.float64
    assert (np.diff(quantiser.levels) >= 0).all()


@pytest.mark.parametrize("levels", [2, 8, 16])
@pytest.mark.parametrize("x", HARD_SAMPLES.values(), ids=HARD_SAMPLES.keys())
def test_no_worse_than_kmeans(x, levels):
    quantiser = lloyd_max(x, levels)
    assert_is_quantiser(quantiser, levels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        kmeans = KMeans(levels, n_init=4, random_state=0).fit(x[:, None])
    # One-sided: random starts often leave k-means in a worse optimum.
    assert quantiser.distortion <= 1.01 * kmeans.inertia_ / len(x)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(-40, 40), min_size=1, max_size=10), st.integers(1, 5))
def test_small_samples_are_solved_exactly(values, levels):
    x = np.sort(np.array(values, dtype=np.float64))
    best = min(
        sum(((cell - cell.mean()) ** 2).sum() for cell in np.split(x, cuts) if len(cell)) / len(x)
        for cuts in itertools.combinations_with_replacement(range(len(x) + 1), levels - 1)
    )
    assert lloyd_max(x, levels).distortion == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("levels", GAUSSIAN_DISTORTIONS)
def test_large_gaussian_sample_gives_the_gaussian_quantiser(levels):
    found = lloyd_max(GAUSSIAN_GRID, levels)
    assert found.distortion == pytest.approx(GAUSSIAN_DISTORTIONS[levels], rel=3e-3)
    if levels == 8:
        np.testing.assert_allclose(found.levels, EIGHT_LEVELS, atol=0.03)


both = pytest.mark.parametrize("quantise", [lloyd_max, uniform_quantizer])


@both
@pytest.mark.parametrize("x", HARD_SAMPLES.values(), ids=HARD_SAMPLES.keys())
def test_order_and_shape_do_not_matter(quantise, x):
    weights = np.random.default_rng(1).integers(1, 5, len(x)) / 3
    order = np.random.default_rng(2).permutation(len(x))
    for given_weights, shuffled_weights in ((None, None), (weights, weights[order][None])):
        first, second = quantise(x, 8, given_weights), quantise(x[order][None], 8, shuffled_weights)
        np.testing.assert_array_equal(first[0], second[0])


@both
@pytest.mark.parametrize("factor", [2.0**-40, 1e-150, 3.7, 1e6, 1e150])
@pytest.mark.parametrize("levels", [2, 8, 64])
def test_scale_equivariance(quantise, factor, levels):
    x = HARD_SAMPLES["student, 2 degrees"]
    unit, scaled = quantise(x, levels), quantise(factor * x, levels)
    np.testing.assert_allclose(scaled[0], factor * unit[0], rtol=1e-6, atol=1e-9 * factor)
    assert scaled.distortion == pytest.approx(factor * factor * unit.distortion, rel=1e-6)


@pytest.mark.parametrize("shift", [-3.0, 1e4])
def test_shift_and_mirror(shift):
    x = HARD_SAMPLES["gaussian"]
    unit, shifted, mirrored = lloyd_max(x, 8), lloyd_max(x + shift, 8), lloyd_max(-x, 8)
    np.testing.assert_allclose(shifted.levels, unit.levels + shift, atol=1e-6)
    assert shifted.distortion == pytest.approx(unit.distortion, rel=1e-6)
    np.testing.assert_allclose(mirrored.levels, -unit.levels[::-1], atol=1e-6)


def test_largest_numbers_do_not_overflow():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        levels = module.lloyd_max([-1.7e308, -1.6e308, 1.6e308, 1.7e308], 2)
    np.testing.assert_allclose(levels, [-1.65e308, 1.65e308], rtol=1e-12)


@both
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32])
def test_dtypes(quantise, dtype):
    x = (HARD_SAMPLES["laplace"] * 100).astype(dtype)
    np.testing.assert_array_equal(quantise(x, 8)[0], quantise(x.astype(np.float64), 8)[0])


@pytest.mark.parametrize("levels", [1, 2, 3, 8])
def test_few_distinct_values(levels):
    values = np.array([-0.3, 0.1, 0.7])
    quantiser = lloyd_max(np.repeat(values, [5, 1, 30]), levels)
    assert_is_quantiser(quantiser, levels)
    if levels >= 3:
        np.testing.assert_array_equal(quantiser.levels, [*values, *[0.7] * (levels - 3)])
        assert quantiser.distortion == 0.0
    else:
        assert quantiser.distortion > 0.0


@pytest.mark.parametrize("value", [0.0, 0.1, -3e300, 1e-300])
def test_constant_input(value):
    quantiser = lloyd_max(np.full(100, value), 8)
    np.testing.assert_array_equal(quantiser.levels, value)
    assert quantiser.distortion == 0.0


def test_values_that_merge_in_rounding():
    # Sixteen neighbours of 1 and one far value: in units of the range the neighbours are one number.
    x = np.concatenate([1.0 + np.arange(16) * 2.0**-52, [1e6]])
    quantiser = lloyd_max(x, 4)
    assert_is_quantiser(quantiser, 4)
    assert quantiser.levels[0] == pytest.approx(1.0, abs=1e-9)
    assert quantiser.levels[-1] == 1e6
    assert quantiser.distortion < 1e-18


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=60),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_any_sample_gives_a_sound_quantiser(values, levels, random):
    x = np.array(values)
    quantiser = lloyd_max(x, levels)
    assert_is_quantiser(quantiser, levels)
    assert quantiser.levels[0] >= x.min() - 1e-9 * np.abs(x).max()
    assert quantiser.levels[-1] <= x.max() + 1e-9 * np.abs(x).max()
    scale = np.abs(x).max() ** 2
    assert quantiser.distortion <= x.var() + 1e-12 * scale
    random.shuffle(values)
    np.testing.assert_array_equal(lloyd_max(values, levels).levels, quantiser.levels)


def test_a_level_that_loses_its_samples_is_used_elsewhere():
    # The middle cell of the start holds 0 and 10, which are nearer to -1 and 11 than to their mean.
    x = np.array([-1.0, -1.0, 0.0, 10.0, 11.0, 11.0, 12.0])
    levels = _lloyd(_PrefixSums(x, np.ones(len(x))), _run_starts(x), np.array([0, 2, 4, 7]))
    assert (np.diff(levels) > 0).all()
    assert mean_squared_error(x, levels) == pytest.approx(mean_squared_error(x, lloyd_max(x, 3).levels))


@pytest.mark.parametrize(
    ("quantise", "atol", "rel"), [(lloyd_max, 5e-3, 1e-3), (uniform_quantizer, 1e-9, 1e-9)], ids=["best", "even"]
)
def test_whole_weights_are_repeats(quantise, atol, rel):
    rng = np.random.default_rng(3)
    x, repeats = rng.standard_normal(3000), rng.integers(0, 4, 3000)
    repeated = quantise(np.repeat(x, repeats), 8)
    for scale in (1, 1e-300, 1e300):
        weighted = quantise(x, 8, weights=scale * repeats)
        np.testing.assert_allclose(weighted[0], repeated[0], atol=atol)
        assert weighted.distortion == pytest.approx(repeated.distortion, rel=rel)


def test_density_as_weights():
    x = np.linspace(-8, 8, 20_001)
    quantiser = lloyd_max(x, 8, weights=norm.pdf(x))
    np.testing.assert_allclose(quantiser.levels, EIGHT_LEVELS, atol=5e-3)
    assert quantiser.distortion == pytest.approx(0.034548, abs=1e-5)


@pytest.mark.parametrize("small", [1e-30, 1e-14, 3e-15])
def test_weights_lost_in_rounding(small):
    x = np.arange(60.0)
    weights = np.where(x < 25, 1.0, small * (1 + np.arange(60) % 7))
    quantiser = lloyd_max(x, 40, weights=weights)
    assert_is_quantiser(quantiser, 40)
    # The heavy samples have a level each, the others at least one among them.
    assert np.abs(quantiser.levels[:, None] - x[:25]).min(axis=0).max() < 1e-12
    assert 25 - 1e-12 <= quantiser.levels[-1] <= 59 + 1e-12
    assert quantiser.distortion < 1e4 * small


def even_levels(step, levels):
    return step * (np.arange(levels) - (levels - 1) / 2)


@pytest.mark.parametrize(
    ("levels", "step", "distortion"),
    [(2, 1.5957, 0.3634), (4, 0.9957, 0.1188), (8, 0.5860, 0.03744), (16, 0.3352, 0.01154), (32, 0.1881, 0.003495)],
)
def test_even_gaussian_levels_are_the_published_ones(levels, step, distortion):
    # Max 1960, table II; one unit in the last digit.
    found = gaussian_uniform(levels)
    assert found.step == pytest.approx(step, abs=1.0001e-4)
    assert found.distortion == pytest.approx(distortion, abs=10.0 ** -(4 if levels < 8 else 5 if levels < 32 else 6))


@pytest.mark.parametrize("levels", [2, 4, 6, 64, 128, 256])
def test_even_gaussian_levels_by_quadrature(levels):
    found = gaussian_uniform(levels)

    def distortion(step):
        centres = even_levels(step, levels)
        edges = np.concatenate([[-12.0], 0.5 * (centres[1:] + centres[:-1]), [12.0]])
        return sum(
            quad(lambda x, c=c: (x - c) ** 2 * norm.pdf(x), lower, upper, epsabs=0, epsrel=1e-10)[0]
            for c, lower, upper in zip(centres, edges[:-1], edges[1:], strict=True)
        )

    assert found.distortion == pytest.approx(distortion(found.step), rel=1e-8)
    for other in (0.97, 1.03):
        assert distortion(other * found.step) > found.distortion


@pytest.mark.parametrize("levels", [2, 4, 8, 16, 64])
def test_large_gaussian_sample_gives_the_gaussian_step(levels):
    expected, found = gaussian_uniform(levels), uniform_quantizer(GAUSSIAN_GRID, levels)
    assert found.step == pytest.approx(expected.step, rel=5e-3)
    assert found.distortion == pytest.approx(expected.distortion, rel=3e-3)


@pytest.mark.parametrize("levels", [2, 8, 16, 256])
@pytest.mark.parametrize("x", HARD_SAMPLES.values(), ids=HARD_SAMPLES.keys())
def test_even_levels_are_never_worse_than_gaussian_ones(x, levels):
    found = uniform_quantizer(x, levels)
    assert found.distortion == pytest.approx(mean_squared_error(x, even_levels(found.step, levels)), rel=1e-7)
    root_mean_square = np.sqrt(np.square(x).mean())
    gaussian = even_levels(root_mean_square * gaussian_uniform(levels).step, levels)
    assert found.distortion <= mean_squared_error(x, gaussian) * (1 + 1e-9)
    # No step that is near is better by more than a hundredth, unless the sample is a lattice itself.
    for factor in np.linspace(0.8, 1.25, 31) if len(np.unique(x)) > 1000 and levels <= 16 else ():
        assert found.distortion <= 1.01 * mean_squared_error(x, even_levels(factor * found.step, levels))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(-30, 30), min_size=1, max_size=8).filter(any),
    st.sampled_from([2, 4, 6]),
)
def test_even_levels_of_small_samples(values, levels):
    """Against all steps on a fine grid: a thousandth of the power is all that a step can miss."""
    x = np.array(values, dtype=np.float64)
    found = uniform_quantizer(x, levels)
    power = np.square(x).mean()
    start = np.sqrt(power) * gaussian_uniform(levels).step
    least = min(mean_squared_error(x, even_levels(step, levels)) for step in start * np.linspace(0.5, 4, 400))
    assert found.distortion == pytest.approx(mean_squared_error(x, even_levels(found.step, levels)), abs=1e-12 * power)
    assert found.distortion <= least + 1e-3 * power


def test_even_levels_of_literal_numbers():
    # Halves of four levels one apart: the sample itself.
    assert uniform_quantizer([-1.5, -0.5, 0.5, 1.5], 4) == pytest.approx((1.0, 0.0), abs=1e-12)
    assert uniform_quantizer([3.0, -3.0, 3.0], 2) == pytest.approx((6.0, 0.0), abs=1e-12)
    # Two levels at plus and minus the mean size; what is left is its variance.
    assert uniform_quantizer([1.0, -3.0], 2) == pytest.approx((4.0, 1.0))
    assert uniform_quantizer([1.0, -3.0], 2, weights=[3.0, 1.0]) == pytest.approx((3.0, 0.75))


@pytest.mark.parametrize("levels", [2, 8, 256])
@pytest.mark.parametrize("x", HARD_SAMPLES.values(), ids=HARD_SAMPLES.keys())
def test_pooled_parts_give_the_levels_of_the_whole(x, levels):
    """Signs do not matter."""
    weights = np.random.default_rng(1).uniform(0.1, 5, len(x))
    whole = uniform_quantizer(np.append(-x, np.zeros(10)), levels, np.append(weights, np.ones(10)))
    cuts = [len(x) // 7, len(x) // 2]
    parts = [Magnitudes(*part) for part in zip(np.split(x, cuts), np.split(weights, cuts), strict=True)]
    pooled = pooled_uniform_quantizer([parts[1], Magnitudes(np.zeros(10)), parts[2], parts[0]], levels)
    assert pooled.step == pytest.approx(whole.step, rel=1e-11)
    assert pooled.distortion == pytest.approx(whole.distortion, rel=1e-9)


@pytest.mark.parametrize("levels", [0, -2, 258, 2.5, 1, 3, 255])
def test_bad_numbers_of_levels(levels):
    calls = [lambda: gaussian_uniform(levels), lambda: uniform_quantizer([1.0, 2.0], levels)]
    match = "`levels` must be even"
    if levels not in (1, 3, 255):
        match = "`levels` must be one of 1 to 256"
        calls.append(lambda: lloyd_max([1.0, 2.0], levels))
    for call in calls:
        with pytest.raises(ValueError, match=match):
            call()


@both
@pytest.mark.parametrize(
    ("samples", "weights", "message"),
    [
        ([], None, "empty"),
        ([0.0, np.nan, 1.0, -np.inf], None, "2 values that are NaN or infinite"),
        *(([*x, x[0]], None, "real numbers") for x in ([1j], ["a"], [True])),
        *(([0.0, 1.0], w, "finite and non-negative") for w in ([1.0, -1.0], [np.nan, 1.0], [np.inf, 1.0], [0.0, 0.0])),
        ([0.0, 1.0], [1.0, 1.0, 1.0], "shape"),
    ],
)
def test_bad_samples_and_weights(quantise, samples, weights, message):
    with pytest.raises(ValueError, match=message):
        quantise(samples, 8, weights)


@pytest.mark.parametrize(("samples", "weights"), [(np.zeros(5), None), ([0.0, 1.0], [1.0, 0.0])])
def test_no_step_is_best_for_zeros(samples, weights):
    with pytest.raises(ValueError, match="all zero"):
        uniform_quantizer(samples, 8, weights)
