"""The ranking of candidates: order, residues, agreement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esm_turbo.pictures.panels import Bars, Heatmap, Histogram, Scatter
from esm_turbo.pictures.ranking import matrix_sheet, ranking_sheet
from esm_turbo.pictures.sheets import sheets_of
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.scoring.records import ScoringRun
from esm_turbo.tasks.scoring.specificity import BackgroundFigures


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
    # Likelihoods, since a few perplexities of thousands would leave one bar of all others.
    assert np.exp(-histogram.marks["best"]) == pytest.approx(bars.values[0])
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


@pytest.mark.parametrize("unknown_residues", ["omit", "score"])
def test_residues_left_out_have_a_letter_and_no_colour(ranking, unknown_residues) -> None:
    scores = ranking.scores["full"]
    ones = [
        replace(one, candidate="|" + one.candidate[1:-1] + "X", unknown_residues=unknown_residues)
        for one in scores.scores
    ]
    own = replace(ranking, scores={"full": replace(scores, scores=tuple(ones))}, agreement={})
    _, heatmap = ranking_sheet(own, "").layout[0]
    for row, letters in enumerate(heatmap.letters):
        shown = np.isfinite(heatmap.values[row, : len(letters)]).tolist()
        assert shown == [False, *[True] * (len(letters) - 2), unknown_residues == "score"]


@pytest.mark.parametrize("contexts", [1, 9])
def test_a_ranking_by_specificity_shows_specificity(ranking, contexts: int) -> None:
    figures = [BackgroundFigures(-3.0 + 0.1 * index, 0.5, contexts) for index in range(24)]
    scores = {
        arm: replace(one, sort_by="specificity").with_background(
            dict(zip([s.candidate for s in one.scores[1:]], figures, strict=True)), "targets"
        )
        for arm, one in ranking.scores.items()
    }
    own = replace(ranking, scores=scores)
    (bars, _), (histogram, *_) = ranking_sheet(own, "").layout
    assert bars.names == [own.candidates[index].id for index in own.ranking()[:20]]
    name = "specificity_z" if contexts == 9 else "specificity"
    assert bars.values.tolist() == [getattr(scores["full"].scores[index], name) for index in own.ranking()[:20]]
    assert histogram.marks["best"] == bars.values[0] and histogram.x_label == bars.x_label
    assert ("standard deviations" in bars.x_label) == (contexts == 9)
    # Of candidates of this target alone, there is none.
    scores = {arm: one.with_background({}, "targets") for arm, one in scores.items()}
    (bars, _), _ = ranking_sheet(replace(ranking, scores=scores), "").layout
    assert len(bars.names) == 20 and "pseudo-perplexity" in bars.x_label


def test_scores_alone_do_not_know_their_target(ranking) -> None:
    own = replace(ranking, target=ProteinRecord("target", ""))
    assert ranking_sheet(own, "").title == "target: 25 candidates"


def test_all_targets_are_together_on_the_first_sheet(ranking) -> None:
    other = replace(ranking, target=ProteinRecord("other", "MKT"))
    sheet = matrix_sheet(ScoringRun([ranking, other]), "model x")
    [[heat]] = sheet.layout
    assert isinstance(heat, Heatmap) and heat.values.shape == (2, 8) and not heat.centred
    assert sheet.title == "8 candidates on 2 targets" and len(sheet.table.rows) == 2
    assert matrix_sheet(ScoringRun([ranking]), "") is None
    assert sheets_of(ScoringRun([ranking, other]), None)[0].title == sheet.title
    few = replace(ranking, candidates=ranking.candidates[:1])
    few = replace(few, scores={"full": replace(ranking.scores["full"], scores=ranking.scores["full"].scores[:1])})
    assert matrix_sheet(ScoringRun([few, replace(few, target=other.target)]), "") is None


@pytest.mark.parametrize("named", [True, False])
def test_a_heat_map_shows_what_ranks_by_names_or_residues(ranking, named: bool) -> None:
    own = {
        one.candidate: BackgroundFigures(-3.5, 0.5 + 0.1 * n, 9)
        for n, one in enumerate(ranking.scores["full"].scores[:8])
    }
    scores = {"full": replace(ranking.scores["full"], scores=ranking.scores["full"].scores[:8])}
    scores["full"] = replace(scores["full"].with_background(own, "targets"), sort_by="specificity")
    candidates = tuple(replace(one, id=f"p{n}" if named else f"#{n}") for n, one in enumerate(ranking.candidates[:8]))
    result = replace(ranking, scores=scores, candidates=candidates, agreement={})
    other = replace(result, target=ProteinRecord("other", "MKT"))
    sheet = matrix_sheet(ScoringRun([result, other]), "")
    [[heat]] = sheet.layout
    assert heat.x_label == "candidate" and heat.label == "specificity against 9 other targets (standard deviations)"
    assert heat.centred and sheet.summary
    shown = {one.label: one for one in candidates}
    assert set(heat.columns) == {one.id if named else one.sequence for one in candidates}
    best = heat.columns[int(heat.values[0].argmax())]
    assert shown[best] == candidates[result.ranking()[0]]
    name = f"{shown[best].id} {shown[best].sequence}" if named else best
    column = heat.columns.index(best)
    assert heat.names[1][column] == f"{name} on {heat.rows[1]}, {heat.label}"
    assert sheet.table.columns[:2] == ["target", "number"] and set(sheet.table.columns[2:]) == set(heat.columns)
    (bars, _), *_ = ranking_sheet(result, "").layout
    assert bars.names[0] == best and bars.hover[0] == name
    # By likelihood, that is drawn, too.
    by_likelihood = {"full": replace(scores["full"], sort_by="likelihood")}
    likely = matrix_sheet(ScoringRun([replace(one, scores=by_likelihood) for one in (result, other)]), "")
    [[heat]] = likely.layout
    assert heat.label == "mean log p (nats per residue)"
    assert "--sort-by specificity" in likely.caption and "--sort-by" not in sheet.caption


def test_columns_of_repeated_names_are_told_apart(ranking) -> None:
    result = replace(ranking, candidates=tuple(replace(one, id="p") for one in ranking.candidates))
    [[heat]] = matrix_sheet(ScoringRun([result, replace(result, target=ProteinRecord("other", "MKT"))]), "").layout
    assert set(heat.columns) == {one.sequence for one in result.candidates}
    # Named as another one's residues.
    names = ["#1", result.candidates[0].sequence, *["p"] * 6]
    candidates = tuple(replace(one, id=name) for one, name in zip(result.candidates, names, strict=False))
    scores = {"full": replace(ranking.scores["full"], scores=ranking.scores["full"].scores[:8])}
    result = replace(ranking, candidates=candidates, scores=scores, agreement={})
    [[heat]] = matrix_sheet(ScoringRun([result, replace(result, target=ProteinRecord("other", "MKT"))]), "").layout
    column = heat.columns.index(names[1])
    assert heat.names[0][column].split(" on ")[0] == names[1]


def test_one_arm_has_nothing_to_agree_with(ranking) -> None:
    one = replace(ranking, scores={"full": ranking.scores["full"]}, agreement={})
    assert [len(row) for row in ranking_sheet(one, "").layout] == [2, 1]
