"""Agreement of rankings, against values by hand and SciPy."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from esm_turbo.tasks.common.rankings import lowest_first, rank_agreement, spearman


def test_by_hand():
    found = rank_agreement([4, 3, 2, 1], [4, 2, 3, 1], top_k=2)
    # 1 - 6 (1 + 1) / (4 (16 - 1)).
    assert found.spearman == pytest.approx(0.8)
    assert (found.count, found.top_k, found.top_k_overlap, found.mean_difference) == (4, 2, 0.5, 0.5)
    assert found.to_dict()["top_k_overlap"] == 0.5


def test_top_k_is_at_most_the_number_of_items():
    found = rank_agreement([1.0, 2.0], [3.0, 1.0], top_k=10)
    assert (found.top_k, found.top_k_overlap) == (2, 1.0)
    assert found.spearman == pytest.approx(-1)


def test_ties_go_to_the_first():
    assert rank_agreement([1, 1, 1], [1, 1, 0], top_k=2).top_k_overlap == 1.0
    assert rank_agreement([1, 1, 1], [0, 1, 1], top_k=2).top_k_overlap == 0.5


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [2.0]), ([1, 1], [1, 2]), ([1, 2], [3, 3])])
def test_an_undefined_correlation(ours, theirs):
    assert spearman(ours, theirs) is None
    assert rank_agreement(ours, theirs).spearman is None


_scores = st.floats(-50, 0).map(lambda x: round(x, 2))


@settings(max_examples=30)
@given(st.lists(st.tuples(_scores, _scores), min_size=2, max_size=30))
def test_invariants(pairs):
    ours, theirs = map(list, zip(*pairs, strict=True))
    found = rank_agreement(ours, theirs, top_k=3)
    assert 0 <= found.top_k_overlap <= 1
    assert found.spearman == pytest.approx(rank_agreement(theirs, ours, top_k=3).spearman)
    itself = rank_agreement(ours, ours, top_k=3)
    assert (itself.top_k_overlap, itself.mean_difference) == (1.0, 0.0)
    if len(set(ours)) > 1 and len(set(theirs)) > 1:
        assert found.spearman == pytest.approx(float(spearmanr(ours, theirs).statistic))


@pytest.mark.parametrize(
    ("ours", "theirs", "top_k", "message"),
    [
        ([], [], 1, "the same items"),
        ([1.0], [1.0, 2.0], 1, "the same items"),
        ([1.0, math.nan], [1.0, 2.0], 1, "not finite"),
        ([1.0, 2.0], [1.0, math.inf], 1, "not finite"),
        ([1.0], [1.0], 0, "`top_k` must be at least 1, got 0"),
    ],
)
def test_invalid_arguments(ours, theirs, top_k, message):
    with pytest.raises(ValueError, match=message):
        rank_agreement(ours, theirs, top_k)


def test_what_has_no_number_comes_last() -> None:
    """Comparisons with NaN are all false, which would leave finite values out of order."""
    assert lowest_first([7.7, math.nan, 2.1, None, 19.9, 2.1]) == [2, 5, 0, 4, 1, 3]
