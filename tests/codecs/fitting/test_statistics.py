"""Merging moments against NumPy on all vectors at once; what a codec is given to fit."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from esm_turbo.codecs.fitting.statistics import KVStatistics, Moments, Sensitivity, TokenMoments, TokenSample
from esm_turbo.config import Geometry

VECTORS = st.integers(0, 6).flatmap(
    lambda n: hnp.arrays(np.float64, (n, 2, 3), elements=st.floats(-1e3, 1e3, allow_subnormal=False))
)


def moments_of(x):
    """Moments of vectors [n, ..., d], directly."""
    if not len(x):
        return Moments.empty(*x.shape[1:])
    mean = x.mean(axis=0)
    centred = x - mean
    return Moments(len(x), mean, np.einsum("n...i,n...j->...ij", centred, centred) / len(x))


def assert_same(actual, expected, atol=1e-7):
    assert actual.count == expected.count
    np.testing.assert_allclose(actual.mean, expected.mean, rtol=1e-9, atol=atol)
    np.testing.assert_allclose(actual.covariance, expected.covariance, rtol=1e-9, atol=atol)


@settings(max_examples=60, deadline=None)
@given(st.lists(VECTORS, min_size=1, max_size=5))
def test_merged_moments_are_those_of_all_vectors(parts):
    merged = functools.reduce(Moments.merge, map(moments_of, parts))
    assert_same(merged, moments_of(np.concatenate(parts)))


def test_large_means_do_not_cost_the_variance_its_digits():
    rng = np.random.default_rng(1)
    x = 1e6 + rng.standard_normal((1000, 1, 4))
    merged = functools.reduce(Moments.merge, (moments_of(part) for part in np.array_split(x, 50)))
    np.testing.assert_allclose(merged.covariance, moments_of(x).covariance, atol=1e-7)


def test_second_moment_is_about_zero():
    x = 2 + np.random.default_rng(2).standard_normal((50, 3, 4))
    expected = np.einsum("nhi,nhj->hij", x, x) / 50
    np.testing.assert_allclose(moments_of(x).second_moment, expected, rtol=1e-12)


def token_moments(rng, count):
    return TokenMoments(*(moments_of(rng.standard_normal((count, 2, 3, 4))) for _ in range(2)))


@pytest.fixture
def statistics():
    rng = np.random.default_rng(3)
    shape = (2, 3, 10, 4)
    sample = TokenSample(
        rng.standard_normal(shape).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
        np.array([True, False] * 5),
        np.arange(10),
        rng.random(shape[:3]).astype(np.float32),
        rng.random(shape[:3]).astype(np.float32),
    )
    return KVStatistics(
        Geometry(2, 3, 4),
        token_moments(rng, 40),
        token_moments(rng, 8),
        Sensitivity.empty(2, 3, 4),
        sample,
        np.ones(2),
        np.zeros((2, 3, 4, 4)),
    )


def sensitivity_of(keys, values, weights):
    """Of residues with keys and values [n, 2, 3] and weights [n, 2], directly."""
    n = len(keys)

    def weighted(x):
        count = weights.sum(axis=0)
        share = weights / count
        mean = np.einsum("nl,nld->ld", share, x)
        return Moments(count, mean, np.einsum("nl,nli,nlj->lij", share, x - mean, x - mean))

    queries = np.einsum("nl,nli,nlj->lij", weights, values, values) / n
    return Sensitivity(n, keys.mean(axis=0), weighted(keys), weighted(values), queries, (weights**2).mean(axis=0))


def test_sensitivities_merge_as_if_seen_at_once():
    rng = np.random.default_rng(4)
    keys, values, weights = rng.standard_normal((30, 2, 3)), rng.standard_normal((30, 2, 3)), rng.random((30, 2))
    parts = [sensitivity_of(keys[p], values[p], weights[p]) for p in (slice(0, 4), slice(4, 19), slice(19, 30))]
    whole = sensitivity_of(keys, values, weights)
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = functools.reduce(Sensitivity.merge, (parts[i] for i in order), Sensitivity.empty(2, 3))
        assert merged.count == 30
        for name in ("key_mean", "queries", "attention"):
            np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), rtol=1e-9)
        for name in ("keys", "values"):
            mine, theirs = getattr(merged, name), getattr(whole, name)
            np.testing.assert_allclose(mine.count, theirs.count, rtol=1e-9)
            np.testing.assert_allclose(mine.mean, theirs.mean, rtol=1e-9)
            np.testing.assert_allclose(mine.covariance, theirs.covariance, rtol=1e-9)


def test_token_moments_merge_state_by_state(statistics):
    merged = statistics.residues.merge(statistics.specials)
    for state in ("keys", "values"):
        assert_same(
            getattr(merged, state), getattr(statistics.residues, state).merge(getattr(statistics.specials, state))
        )


def test_protected_tokens_are_left_out_of_what_is_fitted(statistics):
    moments, sample = statistics.select(protect_special_tokens=True)
    assert moments is statistics.residues
    np.testing.assert_array_equal(sample.keys, statistics.sample.keys[:, :, 1::2])
    np.testing.assert_array_equal(sample.values, statistics.sample.values[:, :, 1::2])
    assert not sample.is_special.any()


def test_otherwise_all_tokens_are_fitted(statistics):
    moments, sample = statistics.select(protect_special_tokens=False)
    assert moments.keys.count == 48
    assert_same(moments.values, statistics.residues.values.merge(statistics.specials.values))
    assert sample is statistics.sample


def test_sample_without_tokens_to_fit_is_refused(statistics):
    specials = dataclasses.replace(statistics.sample, is_special=np.ones(10, dtype=bool))
    statistics = dataclasses.replace(statistics, sample=specials)
    with pytest.raises(ValueError, match=r"no residues.*larger `sample_size`"):
        statistics.select(protect_special_tokens=True)
    assert statistics.select(protect_special_tokens=False)[1] is specials
