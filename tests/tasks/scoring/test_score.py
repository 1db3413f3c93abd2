"""Scores of candidates: every arm against an independent computation, and invalid arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.tasks.common import forwards, row_engine
from esm_turbo.tasks.scoring.score import CandidateScore, Scores
from esm_turbo.tasks.scoring.specificity import BackgroundFigures
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import CLS, EOS, MASK

TARGET = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQ"
CANDIDATES = ["GSWKDLA", "WTCAC", "PLLKRRA", "DEFGH", "Y"]
# Float32 against float64, or other batches; log-probabilities of a few nats.
TOLERANCE = 2e-5


def log_probabilities(scores: Scores) -> torch.Tensor:
    return torch.tensor([x for one in scores.scores for x in one.log_probabilities], dtype=torch.float64)


def assert_close(ours: Scores, expected: list[float]) -> None:
    difference = (log_probabilities(ours) - torch.tensor(expected, dtype=torch.float64)).abs().max()
    assert difference <= TOLERANCE


def independent(
    turbo: TurboEsm,
    mini_frozen: FrozenEsm2,
    place: str,
    refresh: int,
    target: str = TARGET,
    candidates: list[str] = CANDIDATES,
) -> list[float]:
    """The frozen arm from the tensors of the checkpoint, one masked copy at a time."""
    expected = []
    target_ids = [CLS, *turbo.codes.encode(target, "target")]
    for candidate in candidates:
        ids = turbo.codes.encode(candidate, "candidate")
        after = [*[MASK] * len(ids), EOS] if place == "masked" else []
        context = mini_frozen.context([*target_ids, *after])
        # <cls> never runs again.
        kept = max(1, len(target_ids) - refresh)
        hidden = tuple(range(kept, len(target_ids) + len(after)))
        for index, residue in enumerate(ids):
            new = [*target_ids[kept:], *ids[:index], MASK, *ids[index + 1 :], EOS]
            positions = list(range(kept, kept + len(new)))
            run = mini_frozen.extend([*target_ids, *after], context, new, positions=positions, hidden=hidden)
            logits = run.logits[len(target_ids) - kept + index]
            expected.append(float(logits.log_softmax(0)[residue]))
    return expected


def test_full_is_a_plain_loop_over_hugging_face(turbo: TurboEsm, mini_hf: EsmForMaskedLM) -> None:
    expected = []
    for candidate in CANDIDATES:
        ids = turbo.tokenizer(TARGET + candidate, return_tensors="pt").input_ids
        for index in range(len(candidate)):
            masked = ids.clone()
            at = 1 + len(TARGET) + index
            masked[0, at] = MASK
            with torch.no_grad():
                logits = mini_hf(masked).logits[0, at].double()
            expected.append(float(logits.log_softmax(0)[ids[0, at]]))
    ours = turbo.score(TARGET, CANDIDATES, arm="full")
    assert_close(ours, expected)
    assert (ours.arm, ours.preset, ours.place, ours.refresh) == ("full", None, None, 0)


@pytest.mark.parametrize("refresh", [0, 3, 8, len(TARGET), 10_000])
@pytest.mark.parametrize("place", ["masked", "empty"])
def test_frozen_is_the_independent_computation(
    turbo: TurboEsm, mini_frozen: FrozenEsm2, place: str, refresh: int
) -> None:
    candidates = CANDIDATES[:2]
    ours = turbo.score(TARGET, candidates, arm="frozen", place=place, refresh=refresh)
    assert_close(ours, independent(turbo, mini_frozen, place, refresh, candidates=candidates))
    assert (ours.arm, ours.preset, ours.place) == ("frozen", "exact", place)
    assert ours.refresh == min(refresh, len(TARGET))


@pytest.mark.parametrize("place", ["masked", "empty"])
def test_turbo_reads_the_compressed_context_as_the_slow_backend_does(
    turbo: TurboEsm, slow: TurboEsm, place: str
) -> None:
    ours = turbo.score(TARGET, CANDIDATES, place=place)
    assert_close(ours, log_probabilities(slow.score(TARGET, CANDIDATES, place=place)).tolist())
    assert (ours.arm, ours.preset) == ("turbo", turbo.model.esm.turbo_config.name)
    frozen = log_probabilities(turbo.score(TARGET, CANDIDATES, arm="frozen", place=place))
    assert 1e-4 < (log_probabilities(ours) - frozen).abs().max() < 0.5


@pytest.mark.parametrize("refresh", [0, 8])
def test_turbo_alone_is_extend(turbo: TurboEsm, refresh: int) -> None:
    cache = turbo.prefill(TARGET)
    expected = []
    for candidate in CANDIDATES:
        for index, residue in enumerate(candidate):
            masked = candidate[:index] + "<mask>" + candidate[index + 1 :]
            logits = turbo.extend(cache, masked, refresh=refresh).logits[0, index].double()
            expected.append(float(logits.log_softmax(0)[turbo.codes.residues[residue]]))
    assert_close(turbo.score(TARGET, CANDIDATES, place="empty", refresh=refresh), expected)


def test_a_whole_refresh_of_an_uncompressed_context_is_the_full_arm(turbo: TurboEsm) -> None:
    # Everything but <cls> runs again, so it is close to the full arm but not equal.
    full = log_probabilities(turbo.score(TARGET, CANDIDATES, arm="full"))
    errors = []
    for refresh in (0, 8, len(TARGET)):
        ours = log_probabilities(turbo.score(TARGET, CANDIDATES, arm="frozen", refresh=refresh))
        errors.append(float((ours - full).abs().mean()))
    assert errors[2] < errors[1] < errors[0]
    assert 0 < errors[2] < 0.02


@pytest.mark.parametrize("refresh", [0, 5])
def test_a_given_cache_is_the_target_alone(turbo: TurboEsm, refresh: int) -> None:
    cache = turbo.prefill(TARGET)
    ours = turbo.score(cache, CANDIDATES, refresh=refresh)
    assert ours == turbo.score(TARGET, CANDIDATES, place="empty", refresh=refresh)
    assert cache.lengths.tolist() == [1 + len(TARGET)]


def test_scores_name_the_preset_of_a_given_cache() -> None:
    turbo, other = (TurboEsm.from_pretrained(device="cpu", preset=one) for one in ("turbo3", "turbo1"))
    context = turbo.prefill(["MKTAYIAKQR"])
    for found in (other.score(context, ["ACD"]), other.score_variants(context, ["K2A"])):
        assert (found.arm, found.preset) == ("turbo", "turbo3")
    assert other.score("MKTAYIAKQR", ["ACD"], arm="turbo").preset == "turbo1"


def test_a_cache_with_a_gap_keeps_its_positions(turbo: TurboEsm, mini_frozen: FrozenEsm2) -> None:
    exact = TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu")
    ids = [CLS, *turbo.codes.encode(TARGET, "target")]
    positions = [*range(20), *range(50, 50 + len(ids) - 20)]
    with torch.no_grad():
        output = exact.model(torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=True)
    ours = exact.score(output.past_key_values, "WTCAC", refresh=4)
    with pytest.raises(ValueError, match="`rescore` computes a whole target again, and the cache does not hold one"):
        exact.score(output.past_key_values, "WTCAC", rescore=1)
    context = mini_frozen.run(ids, positions, total_tokens=len(ids), total_masks=0)
    expected = []
    residues = turbo.codes.encode("WTCAC", "candidate")
    kept = len(ids) - 4
    for index, residue in enumerate(residues):
        new = [*ids[kept:], *residues[:index], MASK, *residues[index + 1 :], EOS]
        refreshed = list(range(positions[kept], positions[kept] + len(new)))
        run = mini_frozen.extend(ids, context, new, positions=refreshed, hidden=tuple(range(kept, len(ids))))
        expected.append(float(run.logits[4 + index].log_softmax(0)[residue]))
    assert_close(ours, expected)
    assert ours.arm == "frozen"


@settings(max_examples=12, deadline=None)
@given(
    candidates=st.lists(st.text(STANDARD_RESIDUES, min_size=1, max_size=6), min_size=1, max_size=4),
    toks_per_batch=st.integers(1, 400),
    arm=st.sampled_from(["full", "frozen", "turbo"]),
)
def test_a_score_does_not_depend_on_the_batch(
    turbo: TurboEsm, candidates: list[str], toks_per_batch: int, arm: str
) -> None:
    target = TARGET[:20]
    together = turbo.score(target, candidates, arm=arm, toks_per_batch=toks_per_batch)
    assert [one.candidate for one in together.scores] == candidates
    for candidate, one in zip(candidates, together.scores, strict=True):
        assert len(one.log_probabilities) == len(candidate)
        [alone] = turbo.score(target, candidate, arm=arm).scores
        assert one.log_probabilities == pytest.approx(alone.log_probabilities, abs=TOLERANCE)
        assert max(one.log_probabilities) <= 0


def test_statistics_of_a_score() -> None:
    one = CandidateScore("AC", (math.log(0.5), math.log(0.125)))
    assert one.pseudo_log_likelihood == pytest.approx(math.log(0.0625), rel=1e-12)
    assert one.pseudo_perplexity == pytest.approx(4, rel=1e-12)
    assert one.is_finite()
    assert not CandidateScore("AC", (math.nan, -1.0)).is_finite()
    unlikely = CandidateScore("A", (-800.0,))
    assert unlikely.is_finite() and unlikely.pseudo_perplexity == math.inf
    scores = Scores((one, CandidateScore("GG", (-0.1, -0.1)), one), "turbo", "turbo3", "masked", 8, "m")
    assert scores.ranking() == [1, 0, 2]
    assert scores.agreement(scores).to_dict() == {
        "count": 3,
        "spearman": pytest.approx(1),
        "top_k": 3,
        "top_k_overlap": 1.0,
        "mean_difference": 0.0,
    }
    with pytest.raises(ValueError, match="same candidates in the same order"):
        scores.agreement(Scores(scores.scores[::2], "full", None, None, 0, "m"))
    first = scores.to_dict()["candidates"][0]
    assert first["log_probabilities"] == [math.log(0.5), math.log(0.125)]


def test_lower_case_and_a_trailing_stop_are_accepted(turbo: TurboEsm) -> None:
    ours = turbo.score(TARGET.lower() + "*", ["wtcac*"])
    assert ours == turbo.score(TARGET, ["WTCAC"])
    assert ours.scores[0].candidate == "WTCAC"


def test_half_precision_scores_are_finite_and_near(turbo: TurboEsm) -> None:
    half = TurboEsm.from_pretrained(device="cpu", dtype=torch.bfloat16)
    ours = log_probabilities(half.score(TARGET, CANDIDATES))
    assert (ours - log_probabilities(turbo.score(TARGET, CANDIDATES))).abs().mean() < 0.05


def test_a_decoded_context_gives_the_same_scores(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_DECODED_FROM", {})
    packed = turbo.score(TARGET, CANDIDATES)
    monkeypatch.setattr(forwards, "_DECODED_FROM", {"cpu": 1})
    decoded = turbo.score(TARGET, CANDIDATES)
    assert decoded.preset == "turbo3"
    assert 0 < (log_probabilities(decoded) - log_probabilities(packed)).abs().max() <= TOLERANCE


def test_what_cannot_be_scored_again_is_told(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    original = row_engine.check_memory

    def check(encoder: Any, tokens: int, **options: Any) -> None:
        if tokens > 40:
            raise NotEnoughMemoryError("no memory for a whole protein")
        original(encoder, tokens, **options)

    monkeypatch.setattr(row_engine, "check_memory", check)
    with pytest.raises(NotEnoughMemoryError, match="no memory for a whole protein"):
        turbo.score(TARGET, CANDIDATES, rescore=1)
    with pytest.warns(UserWarning, match=r"^not scored again: target 1: .*no memory for a whole protein"):
        found = turbo.score_pairs([TARGET[:9], TARGET], CANDIDATES, rescore=1)
    assert found[0].rescored and not found[1].rescored and not found.failed


def test_the_best_are_scored_again_exactly(turbo: TurboEsm) -> None:
    full = turbo.score(TARGET, CANDIDATES, arm="full")
    calls: list[str] = []
    for target in (TARGET, turbo.prefill(TARGET)):
        calls.clear()
        found = turbo.score(target, CANDIDATES, rescore=2, progress=lambda stage, *_: calls.append(stage))
        best = found.ranking()[:2]
        assert found.rescored is not None and sorted(found.rescored) == sorted(best)
        for index, one in found.rescored.items():
            assert one.pseudo_perplexity == pytest.approx(full.scores[index].pseudo_perplexity, rel=1e-4)
        cells = {row[0]: row[-2:] for row in found.rows()}
        ranked = sorted(best, key=lambda index: full.scores[index].pseudo_perplexity)
        assert [cells[CANDIDATES[index]][1] for index in ranked] == [1, 2]
        assert sum(cell == (None, None) for cell in cells.values()) == 3
        assert found.columns()[-2:] == ["full_pseudo_perplexity", "full_rank"]
        assert list(dict.fromkeys(calls)) == ["score", "rescore"]
        assert Scores.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("background", ["decoys", "targets"])
def test_the_exact_specificity_has_an_exact_background(turbo: TurboEsm, background: str) -> None:
    others = ["GSWKDLAEPLLKRRV", "MVLSPADKTNVKAAW", "MKLLVDEFY", "HHHHGSGS", "PPWFYNPPWFY"]
    options: dict[str, Any] = {"rescore": 3, "sort_by": "specificity"}
    if background == "decoys":
        found = turbo.score(TARGET, CANDIDATES, background=others, **options)
    else:
        found = turbo.score_pairs([TARGET, *others], CANDIDATES, **options)[0]
    full = turbo.score(TARGET, CANDIDATES, arm="full", background=others)
    best = found.ranking()[:3]
    assert best == found.ranking("specificity")[:3] != found.ranking("likelihood")[:3]
    assert Scores.from_dict(found.to_dict()) == found
    expected = {index: (full.scores[index].specificity, full.scores[index].specificity_z) for index in best}
    columns = ["full_pseudo_perplexity", "full_specificity", "full_specificity_z", "full_rank"]
    frame = found.to_frame()
    assert frame["rank"].sort_values().index.tolist() == found.ranking()
    assert found.rescored_columns() == list(frame.columns[-4:]) == columns
    for index, values in expected.items():
        assert frame.loc[index, columns[1:3]].tolist() == pytest.approx(values, abs=1e-4)
    assert frame["full_specificity"].notna().sum() == 3
    order = sorted(best, key=lambda index: expected[index][1], reverse=True)
    assert frame["full_rank"][order].tolist() == [1, 2, 3]


def test_exact_ranks_are_in_the_unit_of_all_ranks() -> None:
    def scores(*means: float) -> Scores:
        own = [CandidateScore(letter, (mean,)) for letter, mean in zip("ACD", means, strict=False)]
        return Scores(tuple(own), "frozen", "exact", "masked", 8, "m", sort_by="specificity")

    # The last has too few contexts for standard deviations, so that all are ranked in nats.
    figures = {
        "A": BackgroundFigures(-3.0, 0.1, 5),
        "C": BackgroundFigures(-3.0, 1.0, 5),
        "D": BackgroundFigures(-3.0, 1.0, 2),
    }
    found = scores(-2.5, -2.2, -2.9).with_background(figures, "decoys")
    found = found.with_exact([0, 1], scores(-2.6, -2.3).with_background(figures, "decoys"))
    assert found.specificities()[0] == "nats" and found.ranking() == [1, 0, 2]
    cells = [dict(zip(found.rescored_columns(), one, strict=True)) for one in found.rescored_cells()]
    assert [one["full_rank"] for one in cells] == [2, 1, None]
    assert [one["full_specificity"] for one in cells] == [pytest.approx(0.4), pytest.approx(0.7), None]
    assert [one["full_specificity_z"] for one in cells] == [pytest.approx(4), pytest.approx(0.7), None]


def test_caches_that_do_not_suit(turbo: TurboEsm) -> None:
    cache = turbo.prefill(TARGET)
    with pytest.raises(ValueError, match="is for arm 'turbo', not 'full'"):
        turbo.score(cache, CANDIDATES, arm="full")
    with pytest.raises(ValueError, match="`place` must be 'empty', got 'masked'"):
        turbo.score(cache, CANDIDATES, place="masked")
    cut = turbo.prefill(TARGET * 4)
    cut.drop_front(64)
    with pytest.raises(ValueError, match="`rescore` computes a whole target again, and the cache does not hold one"):
        turbo.score(cut, CANDIDATES, rescore=1)
    cut = turbo.prefill("M")
    cut.crop(1)
    with torch.no_grad():
        ended = turbo.model(torch.tensor([[CLS, 5, EOS]]), use_cache=True).past_key_values
    for wrong, message in (
        (turbo.prefill([TARGET] * 2), "a target must be a cache of one row, this one has 2"),
        (turbo.model.new_cache(), "a target must be a cache of one row, this one has 0"),
        (cut, "holds no residues: prefill a target first"),
        (ended, "holds an <eos>"),
    ):
        with pytest.raises(ValueError, match=message):
            turbo.score(wrong, CANDIDATES)
