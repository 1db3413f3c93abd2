"""Pairs of real targets and peptides, in batches filled across targets."""

from __future__ import annotations

from benchmarks.accuracy import screen_pairs


def test_targets_and_peptides_are_different_and_cover_all_lengths() -> None:
    targets, peptides = screen_pairs.pairs(6)
    assert len(targets) == len(set(targets)) == 90
    assert len(peptides) == len(set(peptides)) == 6
    assert [len(one) for one in peptides] == sorted(len(one) for one in peptides)
    assert len(screen_pairs.pairs(6, 3)[0]) == 3
    assert screen_pairs.pairs(6) == (targets, peptides)


def test_pairs_score_as_one_target_at_a_time() -> None:
    for case in screen_pairs.cases(peptides=2, max_targets=2):
        assert case.check().passed
        figures = case.measure(1)
        assert isinstance(figures, dict)
        assert figures["pairs"] == 4 and figures["same_rankings"] == 2
        # Rounding alone: that of the products in `frozen`; in `turbo` it may also move a number to the next code.
        assert figures["largest_difference"] < {"frozen": 1e-4, "turbo": 1e-3}[case.shape["arm"]]
