"""Transforms: orthogonality, exact scores, invariance under planted outliers."""

import numpy as np
import pytest

from esm_turbo.codecs.fitting.transforms import (
    component_variances,
    query_aware,
    random_hadamard,
    standardized,
    svd_rotation,
)

HEAD_DIMS = [16, 24, 32, 64, 128]


def correlated(seed, shape, tokens=400, decay=0.15):
    """Vectors [*stack, tokens, head_dim]: variances that fall along random directions, a mean other than 0."""
    rng = np.random.default_rng(seed)
    head_dim = shape[-1]
    mixing = np.linalg.qr(rng.standard_normal((*shape, head_dim)))[0] * np.exp(-decay * np.arange(head_dim))
    mean = rng.standard_normal((*shape[:-1], 1, head_dim))
    return rng.standard_normal((*shape[:-1], tokens, head_dim)) @ np.swapaxes(mixing, -1, -2) + mean


def second_moment(x):
    return np.swapaxes(x, -1, -2) @ x / x.shape[-2]


def covariance(x):
    return second_moment(x - x.mean(axis=-2, keepdims=True))


def mapped(matrix, x):
    """matrix [..., D, D] applied to each row of x [..., tokens, D]."""
    return x @ np.swapaxes(matrix, -1, -2)


def up_to_signs(rows, expected):
    signs = np.sign((rows * expected).sum(axis=-1, keepdims=True))
    return rows * signs


def assert_inverse(transform, atol=1e-9):
    eye = np.eye(transform.forward.shape[-1])
    np.testing.assert_allclose(
        transform.forward @ transform.inverse, np.broadcast_to(eye, transform.forward.shape), atol=atol
    )


def assert_orthogonal(transform):
    np.testing.assert_allclose(transform.inverse, np.swapaxes(transform.forward, -1, -2), atol=0)
    assert_inverse(transform, atol=1e-12)


def test_svd_rotation_has_fixed_signs():
    rng = np.random.default_rng(0)
    moment = second_moment(correlated(1, (5, 16)))
    rows = svd_rotation(moment).forward
    largest = np.abs(rows).argmax(axis=-1)[..., None]
    assert (np.take_along_axis(rows, largest, axis=-1) > 0).all()
    noisy = moment * (1 + 1e-12 * rng.standard_normal((1, 16, 16)))
    np.testing.assert_allclose(svd_rotation(0.5 * (noisy + np.swapaxes(noisy, -1, -2))).forward, rows, atol=1e-7)


def test_svd_rotation_of_degenerate_moments():
    x = np.zeros((1, 8))
    x[0, 3] = -2.0
    transform = svd_rotation(second_moment(x))
    assert_orthogonal(transform)
    np.testing.assert_allclose(transform.forward[0], np.eye(8)[3], atol=1e-12)
    assert_orthogonal(svd_rotation(np.zeros((4, 4))))


@pytest.mark.parametrize("head_dim", [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 128])
def test_hadamard_entries_have_one_magnitude(head_dim):
    transform = random_hadamard(head_dim, seed=3)
    assert transform.forward.shape == (head_dim, head_dim)
    assert_orthogonal(transform)
    np.testing.assert_allclose(np.abs(transform.forward), head_dim**-0.5, rtol=1e-12)


@pytest.mark.parametrize("head_dim", [3, 5, 6, 7, 9, 10, 18, 25, 52, 100])
def test_hadamard_like_sizes(head_dim):
    transform = random_hadamard(head_dim, seed=3)
    assert_orthogonal(transform)
    outlier = np.zeros(head_dim)
    outlier[0] = 1.0
    # Whatever the odd factor, an outlier is spread over the power of two.
    power = head_dim & -head_dim
    assert np.abs(transform.forward @ outlier).max() <= power**-0.5 + 1e-12


def test_hadamard_of_power_of_two_is_sylvesters():
    rows = random_hadamard(4, seed=0).forward * 2
    np.testing.assert_allclose(
        rows * rows[:1], [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], atol=1e-12
    )


def test_hadamard_seeds():
    first, again, other = (random_hadamard(24, seed).forward for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_allclose(np.abs(first), np.abs(other))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_standardized_components_have_unit_mean_square(head_dim):
    x = correlated(7, (3, head_dim), decay=4 / head_dim)
    moment = second_moment(x)
    for base in (svd_rotation(moment), query_aware(moment, moment)):
        transform = standardized(base, moment, 1e-6)
        assert_inverse(transform)
        np.testing.assert_allclose(np.square(mapped(transform.forward, x)).mean(axis=-2), 1.0, rtol=1e-9)
        np.testing.assert_allclose(
            component_variances(base, moment), np.square(mapped(base.forward, x)).mean(axis=-2), rtol=1e-9
        )


def test_standardized_keeps_dead_components_finite_and_small():
    moment = np.diag([4.0, 1.0, 0.0, 1e-30])
    eye = np.eye(4)
    transform = standardized((eye, eye), moment, 1e-6)
    np.testing.assert_allclose(np.diag(transform.forward), [0.5, 1.0, 5e5, 5e5])
    np.testing.assert_allclose(np.diag(transform.inverse), [2.0, 1.0, 2e-6, 2e-6])
    dead = standardized((eye, eye), np.zeros((2, 4, 4)), 1e-6)
    np.testing.assert_array_equal(dead.forward, np.broadcast_to(np.eye(4), (2, 4, 4)))


def test_variances_are_never_negative():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 40)) @ rng.standard_normal((40, 40))
    variances = component_variances(svd_rotation(second_moment(x)), second_moment(x))
    assert (variances >= 0).all()
    np.testing.assert_allclose(variances.sum(), np.trace(second_moment(x)), rtol=1e-12)


@pytest.mark.parametrize("shrinkage", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_are_preserved(head_dim, shrinkage):
    q, k = correlated(1, (2, head_dim)), correlated(2, (2, head_dim))
    transform = query_aware(covariance(k), second_moment(q), shrinkage)
    assert_inverse(transform, atol=1e-7)
    mapped_q = mapped(np.swapaxes(transform.inverse, -1, -2), q)
    expected = q @ np.swapaxes(k, -1, -2)
    found = mapped_q @ np.swapaxes(mapped(transform.forward, k), -1, -2)
    np.testing.assert_allclose(found, expected, atol=1e-8 * np.abs(expected).max())


def test_error_of_scores_is_the_sum_of_squared_errors():
    q, k = correlated(3, (2, 24)), correlated(4, (2, 24))
    transform = query_aware(covariance(k), second_moment(q))
    error = np.random.default_rng(5).standard_normal((2, 50, 24))
    in_scores = np.square(error @ np.swapaxes(q, -1, -2)).mean(axis=-1)
    np.testing.assert_allclose(np.square(mapped(transform.forward, error)).sum(axis=-1), in_scores, rtol=1e-9)


def test_components_are_uncorrelated_in_falling_order():
    q, k = correlated(3, (2, 24)), correlated(4, (2, 24))
    transform = query_aware(covariance(k), second_moment(q))
    after = transform.forward @ covariance(k) @ np.swapaxes(transform.forward, -1, -2)
    variances = np.diagonal(after, axis1=-2, axis2=-1)
    assert (np.diff(variances, axis=-1) < 0).all()
    scale = np.sqrt(variances[:, :, None] * variances[:, None, :])
    np.testing.assert_allclose(after / scale, np.broadcast_to(np.eye(24), after.shape), atol=1e-6)
    # The eigenvalues are those of S_k S_q, here by a route without square roots.
    expected = np.linalg.eigvals(covariance(k) @ second_moment(q)).real
    np.testing.assert_allclose(variances, -np.sort(-expected, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 10.0, 60.0, 200.0, 1e6])
@pytest.mark.parametrize("shrinkage", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_planted_outliers_change_nothing(head_dim, shrinkage, factor):
    q, k = correlated(8, (2, head_dim), decay=3 / head_dim), correlated(9, (2, head_dim), decay=3 / head_dim)
    scale = np.ones(head_dim)
    scale[[2, 2 + head_dim // 2]] = factor
    scale[[5, 5 + head_dim // 2]] = factor**0.5
    plain = query_aware(covariance(k), second_moment(q), shrinkage)
    planted = query_aware(covariance(k * scale), second_moment(q / scale), shrinkage)
    expected, found = mapped(plain.forward, k), mapped(planted.forward, k * scale)
    spread = expected.std(axis=-2, keepdims=True)
    np.testing.assert_allclose(found / spread, expected / spread, atol=1e-6 * np.abs(expected / spread).max())
    np.testing.assert_allclose(
        component_variances(planted, covariance(k * scale)),
        component_variances(plain, covariance(k)),
        rtol=1e-6,
    )
    # The same for queries, so that scores agree component by component.
    np.testing.assert_allclose(
        planted.inverse / scale[:, None],
        plain.inverse,
        rtol=1e-5,
        atol=1e-6 * np.abs(plain.inverse).max(),
    )


def test_values_are_invariant_channel_by_channel():
    weight, v = np.random.default_rng(0).standard_normal((48, 15)), correlated(10, (15,))
    scale = np.ones(15)
    scale[4] = 200.0
    plain = query_aware(covariance(v), weight.T @ weight, 0.1, rotary_pairs=False)
    planted = query_aware(covariance(v * scale), (weight / scale).T @ (weight / scale), 0.1, rotary_pairs=False)
    np.testing.assert_allclose(mapped(planted.forward, v * scale), mapped(plain.forward, v), atol=1e-6)
    # What the output projection sees is unchanged by a trip through the map.
    back = mapped(weight @ plain.inverse, mapped(plain.forward, v))
    np.testing.assert_allclose(back, mapped(weight, v), atol=1e-9)


def test_full_shrinkage_sees_pairs_only():
    q, k = correlated(8, (16,)), correlated(9, (16,))
    transform = query_aware(covariance(k), second_moment(q), 1.0)
    pair_k, pair_q = (np.tile(np.diag(s).reshape(2, 8).mean(axis=0), 2) for s in (covariance(k), second_moment(q)))
    np.testing.assert_allclose(transform.forward.T @ transform.forward, np.diag(pair_q), atol=1e-12)
    after = transform.forward @ np.diag(pair_k) @ transform.forward.T
    np.testing.assert_allclose(after, np.diag(-np.sort(-pair_k * pair_q)), atol=1e-12)


@pytest.mark.parametrize("shrinkage", [0.0, 0.05])
def test_degenerate_moments_stay_invertible(shrinkage):
    q, k = correlated(1, (16,), tokens=3), correlated(2, (16,), tokens=3)
    q[:, [3, 11]] = 0.0
    k[:, [5, 13]] = 7.0
    for queries in (second_moment(q), np.zeros((16, 16))):
        for keys in (covariance(k), np.zeros((16, 16))):
            transform = query_aware(keys, queries, shrinkage)
            assert np.isfinite(transform.forward).all()
            assert np.isfinite(transform.inverse).all()
            assert_inverse(transform, atol=1e-4)


def test_stacks_are_independent_and_deterministic():
    q, k = correlated(1, (2, 3, 16)), correlated(2, (2, 3, 16))
    stacked = query_aware(covariance(k), second_moment(q), 0.1)
    again = query_aware(covariance(k), second_moment(q), 0.1)
    np.testing.assert_array_equal(stacked.forward, again.forward)
    one = query_aware(covariance(k[1, 2]), second_moment(q[1, 2]), 0.1)
    np.testing.assert_allclose(stacked.forward[1, 2], one.forward, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (np.zeros((3, 4)), "head_dim, head_dim"),
        (np.zeros(4), "head_dim, head_dim"),
        (np.zeros((2, 0, 0)), "head_dim, head_dim"),
        (np.full((4, 4), np.nan), "NaN"),
        (np.diag([1.0, np.inf]), "NaN or infinity"),
        (np.triu(np.ones((4, 4))), "not symmetric"),
        (np.diag([1.0, -0.5]), "negative diagonal"),
    ],
    ids=["not square", "vector", "empty", "NaN", "infinity", "not symmetric", "negative"],
)
def test_bad_moments(moment, message):
    good = np.eye(moment.shape[-1])
    for call in (
        lambda: svd_rotation(moment),
        lambda: query_aware(moment, good),
        lambda: query_aware(good, moment),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_asymmetry_is_seen_beside_an_outlier_channel():
    moment = np.diag([1e8, 1.0, 1.0, 1.0])
    moment[1, 2] = 0.5
    with pytest.raises(ValueError, match="not symmetric"):
        svd_rotation(moment)


def test_a_little_rounding_is_accepted():
    moment = np.diag([1.0, -1e-14])
    moment[0, 1] = 1e-12
    assert_orthogonal(svd_rotation(moment))
    assert_inverse(query_aware(moment, moment), atol=1e-6)
