"""The ranking of candidates: order, residues, agreement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esm_turbo.pictures.panels import Bars, Heatmap, Histogram, Scatter
from esm_turbo.pictures.ranking import ranking_sheet


def test_the_best_are_in_order_with_their_residues(ranking) -> None:
    sheet = ranking_sheet(ranking, "model x")
    (bars, heatmap), (histogram, scatter) = sheet.layout
    assert isinstance(bars, Bars) and isinstance(heatmap, Heatmap)
    best = ranking.ranking()[:20]
    assert bars.names == [ranking.candidates[index].id for index in best]
    assert bars.values.tolist() == sorted(bars.values)
    for row, index in enumerate(best):
        one = ranking.scores["full"].scores[index]
        assert heatmap.letters[row] == one.candidate
        assert heatmap.values[row, : len(one.candidate)].tolist() == list(one.log_probabilities)
        assert np.isnan(heatmap.values[row, len(one.candidate) :]).all()
    assert isinstance(histogram, Histogram) and len(histogram.values) == 25
    assert histogram.marks["best"] == bars.values[0]
    assert isinstance(scatter, Scatter) and scatter.diagonal and len(scatter.x) == 25
    assert "turbo against full" in scatter.title and "% of the best 10 shared" in scatter.title
    assert len(sheet.table.rows) == 50


@pytest.mark.parametrize(("count", "kinds"), [(20, [Scatter]), (21, [Histogram, Scatter])])
def test_few_candidates_are_all_bars_and_need_no_histogram(ranking, count: int, kinds: list[type]) -> None:
    scores = {arm: replace(one, scores=one.scores[:count]) for arm, one in ranking.scores.items()}
    few = replace(ranking, candidates=ranking.candidates[:count], scores=scores)
    first, second = ranking_sheet(few, "").layout
    assert len(first[0].names) == 20 and [type(panel) for panel in second] == kinds
    alone = replace(few, scores={"full": scores["full"]}, agreement={})
    assert len(ranking_sheet(alone, "").layout) == (1 if count == 20 else 2)


def test_one_arm_has_nothing_to_agree_with(ranking) -> None:
    one = replace(ranking, scores={"full": ranking.scores["full"]}, agreement={})
    assert [len(row) for row in ranking_sheet(one, "").layout] == [2, 1]
