"""Specificity: figures of a background, candidates compared with them, and rankings by it."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo import TurboEsm
from esm_turbo.tasks.scoring import pairs, specificity
from esm_turbo.tasks.scoring.score import CandidateScore, Scores
from esm_turbo.tasks.scoring.specificity import BackgroundFigures, background_contexts, figures_in, figures_on_others
from tests.helpers.scores import assert_close

TARGETS = ["MKTAYIAKQRQISFVKSHFSRQLEERLG", "GSWKDLAEPL", "MKLLV"]
CANDIDATES = ["ACDEF", "WTC", "GGGSG"]
_VALUES = st.floats(-20, 0, allow_nan=False)


@given(st.lists(_VALUES, min_size=2, max_size=12))
def test_each_target_is_compared_with_all_others(values: list[float]) -> None:
    for index, found in enumerate(specificity.leave_one_out(values)):
        others = values[:index] + values[index + 1 :]
        assert found.contexts == len(others)
        assert found.mean == pytest.approx(fmean(others), abs=1e-9)
        # Squares lose half of the digits near zero.
        assert found.spread == pytest.approx(stdev(others) if len(others) > 1 else 0, abs=1e-5)


def test_a_single_value_has_no_others() -> None:
    assert specificity.leave_one_out([-1.0]) == []
    assert figures_on_others([("MK", {"AC": -1.0})]) == [{}]


def test_targets_of_the_same_residues_are_one() -> None:
    results = [("MK", {"AC": -1.0}), ("MK", {"AC": -1.0}), ("ML", {"AC": -2.0, "WW": -3.0}), ("MM", {"AC": math.nan})]
    same, again, other, _ = figures_on_others(results)
    assert same == again == {"AC": BackgroundFigures(-2.0, 0.0, 1)}
    assert other == {"AC": BackgroundFigures(-1.0, 0.0, 1)}


def test_figures_of_decoys_leave_out_what_is_not_finite() -> None:
    found = figures_in([{"AC": -1.0, "W": -2.0}, {"AC": -3.0, "W": -math.inf}])
    assert found == {"AC": BackgroundFigures(-2.0, math.sqrt(2), 2), "W": BackgroundFigures(-2.0, 0.0, 1)}


@pytest.mark.parametrize(
    ("background", "expected"),
    [
        (BackgroundFigures(-2.0, 0.5, 5), (1.5, 3.0)),
        (BackgroundFigures(-2.0, 0.5, 4), (1.5, None)),
        (BackgroundFigures(-2.0, 0.0, 9), (1.5, None)),
        (None, (None, None)),
    ],
)
def test_standard_deviations_need_five_contexts_that_differ(
    background: BackgroundFigures | None, expected: tuple[float | None, float | None]
) -> None:
    one = CandidateScore("AC", (-0.25, -0.75), background)
    assert (one.specificity, one.specificity_z) == expected


def test_ranking_by_specificity() -> None:
    figures = [BackgroundFigures(-2.0, 0.5, 6), None, BackgroundFigures(-4.0, 4.0, 6)]
    ones = tuple(CandidateScore("A", (-1.0,), one) for one in figures)
    scores = Scores(ones, "full", None, None, 0, "m", "targets")
    # In standard deviations 2 and 0.75, in nats 1 and 3.
    assert scores.ranking("specificity") == [0, 2, 1]
    few = tuple(CandidateScore("A", (-1.0,), one and one._replace(contexts=4)) for one in figures)
    assert Scores(few, "full", None, None, 0, "m", "targets").ranking("specificity") == [2, 0, 1]
    assert scores.ranking() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"`by` must be one of \['likelihood', 'specificity'\]"):
        scores.ranking("rank")  # type: ignore[arg-type]


def test_pairs_are_compared_with_the_other_targets(turbo: TurboEsm) -> None:
    found = turbo.score_pairs(TARGETS, CANDIDATES)
    plain = turbo.score_pairs(TARGETS, CANDIDATES, background="none")
    assert found[1].background == "targets" and plain[1].background is None
    assert found.columns()[-2:] == ["specificity", "specificity_z"] and "specificity" not in plain.columns()
    for number, candidate in enumerate(CANDIDATES):
        values = [plain[index].scores[number].mean_log_probability for index in range(3)]
        one = found[1].scores[number]
        assert one.candidate == candidate and one.specificity_z is None
        assert one.specificity == pytest.approx(values[1] - (values[0] + values[2]) / 2)
    restored = Scores.from_dict(found[1].to_dict())
    assert restored == found[1]


def test_a_target_is_no_background_of_itself_however_it_is_written(turbo: TurboEsm) -> None:
    first, *others = TARGETS
    expected = [one.specificity for one in turbo.score_pairs(TARGETS, CANDIDATES)[0].scores]
    for same in (f"{first}*", f"{first[:5]}\n{first[5:]}", first.lower()):
        found = turbo.score_pairs([first, *others, same], CANDIDATES)
        assert [one.specificity for one in found[0].scores] == pytest.approx(expected)
    # Nor as a decoy, and decoys of the same residues are one.
    alone = turbo.score_pairs(TARGETS[:1], CANDIDATES, arm="full", background=others)[0].scores
    for decoys in ([first, *others], [f"{first}*", first.lower(), *others, *others]):
        given = [turbo.score(first, CANDIDATES, arm="full", background=decoys)]
        given += [turbo.score_pairs(TARGETS, CANDIDATES, arm="full", background=decoys)[0]]
        for one in given:
            assert [own.background for own in one.scores] == [pytest.approx(own.background, abs=1e-4) for own in alone]


def test_candidates_of_one_target_each_have_no_specificity(turbo: TurboEsm) -> None:
    found = turbo.score_pairs(TARGETS[:2], [["ACDEF"], ["WTC"]])
    assert [one.background for one in found.scores if one is not None] == [None, None]
    for targets, own in ((TARGETS[:2], [["ACDEF"], ["WTC"]]), ([TARGETS[0], TARGETS[0].lower()], CANDIDATES)):
        with pytest.raises(ValueError, match="no candidate has several targets"):
            turbo.score_pairs(targets, own, sort_by="specificity")


@pytest.mark.parametrize("arm", ["full", "turbo"])
def test_without_a_target_and_on_decoys(turbo: TurboEsm, arm: str) -> None:
    options = {"arm": arm, "refresh": 3}
    one = turbo.score(TARGETS[0], CANDIDATES, **options, background=TARGETS[1:])  # type: ignore[arg-type]
    many = turbo.score_pairs(TARGETS[:1], CANDIDATES, **options, background=TARGETS[1:])  # type: ignore[arg-type]
    plain = turbo.score_pairs(TARGETS, CANDIDATES, **options, background="targets")  # type: ignore[arg-type]
    assert_close(one, many[0])
    expected = [a.specificity for a in plain[0].scores]
    for found in (one, many[0]):
        assert [a.specificity for a in found.scores] == pytest.approx(expected, abs=1e-3)
        assert found.background == "decoys"
    alone = turbo.score(TARGETS[0], CANDIDATES, **options, background="alone")  # type: ignore[arg-type]
    assert alone.background == "alone" and all(a.background.contexts == 1 for a in alone.scores if a.background)


def test_without_a_target_the_model_sees_the_candidate_alone(turbo: TurboEsm) -> None:
    """As many forwards of the candidate by itself, one residue masked in each."""
    found = turbo.score("MKLLV", ["WTC"], arm="full", background="alone").scores[0].background
    logits = turbo.model(turbo.tokenizer(["<mask>TC", "W<mask>C", "WT<mask>"], return_tensors="pt").input_ids).logits
    own = [logits[i, 1 + i].log_softmax(-1)[turbo.codes.residues[letter]].item() for i, letter in enumerate("WTC")]
    assert found is not None and found.mean == pytest.approx(fmean(own), abs=1e-4)


def test_the_shipped_decoys_are_folded_soluble_chains() -> None:
    name, decoys = background_contexts("all-decoys", 10)
    assert name == "decoys" and len(decoys) == len({one.sequence for one in decoys}) == 12
    assert {one.structural_class for one in decoys} == {"mainly_alpha", "mainly_beta", "alpha_beta"}
    assert all(100 <= len(one.sequence) <= 150 for one in decoys)
    assert len({one.structural_class for one in decoys[:3]}) == 3


def test_a_repeated_candidate_has_as_many_decoys(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(pairs, "background_contexts", lambda name, targets: asked.append(targets) or (None, []))
    for targets, candidates in ((TARGETS[:1], ["WTC"] * 4), ([TARGETS[0]] * 4, ["WTC"]), (TARGETS[:2], ["WTC", "wtc"])):
        turbo.score_pairs(targets, candidates, background="decoys", arm="frozen")
    assert asked == [1, 1, 2]


@pytest.mark.parametrize(("targets", "count"), [(1, 12), (3, 12), (4, 1), (10, 2), (47, 11), (48, 12), (500, 12)])
def test_decoys_cost_a_quarter_of_the_pairs_where_that_is_one(targets: int, count: int) -> None:
    every = background_contexts("all-decoys", targets)[1]
    assert background_contexts("decoys", targets) == ("decoys", every[:count])


def test_a_screen_of_four_targets_has_one_decoy(turbo: TurboEsm) -> None:
    found = turbo.score_pairs([*TARGETS, "MKTWWA"], CANDIDATES, background="decoys", arm="frozen")
    [decoy] = background_contexts("decoys", 4)[1]
    elsewhere = turbo.score(decoy.sequence, CANDIDATES, arm="frozen")
    for one, other in zip(found[3].scores, elsewhere.scores, strict=True):
        assert one.background is not None and one.background.contexts == 1
        assert one.background.mean == pytest.approx(other.mean_log_probability, abs=1e-4)
    # Pairs of one target each have no four.
    own = turbo.score_pairs([TARGETS[1], TARGETS[2]], [["WTC"], ["GGG"]], background="decoys", arm="frozen")
    assert [one.scores[0].background.contexts for one in (own[0], own[1]) if one.scores[0].background] == [12, 12]


@pytest.mark.parametrize(
    ("background", "message"),
    [
        ("others", r"`background` must be one of \['none', 'alone', 'targets', 'decoys', 'all-decoys'\]"),
        (None, "`background` must be one of .*, got None"),
        ([], "`decoys` must hold at least one decoy"),
        ("targets", "needs several targets"),
        (["MKT", "targets"], "a list of decoys holds residues, not names: give background='targets'"),
        (["M1K"], "1"),
        (["MK", "mk"], "the background holds no other protein than the target"),
    ],
)
def test_backgrounds_that_cannot_be_used(turbo: TurboEsm, background: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turbo.score("MK", ["AC"], background=background)  # type: ignore[arg-type]
