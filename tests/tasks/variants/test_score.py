"""Scores of variants: every arm against an independent computation, and invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm
from esm_turbo.tasks.variants.score import VariantScores
from esm_turbo.tasks.variants.substitutions import all_substitutions, parse_variants
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import CLS, EOS, MASK

WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQLEERLG"
VARIANTS = ["M1A", "K2R", "S13W", "G28D", "S13W:G28D"]
TOLERANCE = 3e-5


def expected_scores(turbo: TurboEsm, logits_at: object, variants: list[str] = VARIANTS) -> list[float]:
    """Scores from a function that gives the logits at a residue."""
    scores = []
    for variant in variants:
        total = 0.0
        for one in parse_variants([variant], WILD_TYPE)[0]:
            log_probs = logits_at(one.index).double().log_softmax(0)
            letters = turbo.codes.residues
            total += float(log_probs[letters[one.mutant]] - log_probs[letters[one.wild_type]])
        scores.append(total)
    return scores


def assert_close(ours: VariantScores, expected: list[float]) -> None:
    assert np.abs(np.array(ours.values) - np.array(expected)).max() <= TOLERANCE


@pytest.mark.parametrize("method", ["masked", "wild_type"])
@torch.no_grad()
def test_full_is_a_plain_loop_over_hugging_face(turbo: TurboEsm, mini_hf: EsmForMaskedLM, method: str) -> None:
    ids = turbo.tokenizer(WILD_TYPE, return_tensors="pt").input_ids

    def logits_at(index: int) -> torch.Tensor:
        changed = ids.clone()
        if method == "masked":
            changed[0, 1 + index] = MASK
        return mini_hf(changed).logits[0, 1 + index]

    ours = turbo.score_variants(WILD_TYPE, VARIANTS, method=method, arm="full")
    assert_close(ours, expected_scores(turbo, logits_at))
    assert (ours.arm, ours.preset, ours.refresh, ours.method) == ("full", None, 0, method)
    assert ours.wild_type == WILD_TYPE


@pytest.mark.parametrize("refresh", [0, 1, 8, 27, 500])
def test_frozen_masked_marginals_are_the_independent_computation(
    turbo: TurboEsm, mini_frozen: FrozenEsm2, refresh: int
) -> None:
    ids = [CLS, *turbo.codes.encode(WILD_TYPE, "protein"), EOS]
    context = mini_frozen.context(ids)
    width = min(refresh, len(WILD_TYPE) - 1) + 1

    def logits_at(index: int) -> torch.Tensor:
        start = min(max(index - (width - 1) // 2, 0), len(WILD_TYPE) - width)
        columns = list(range(1 + start, 1 + start + width))
        new = [MASK if column == 1 + index else ids[column] for column in columns]
        run = mini_frozen.extend(ids, context, new, positions=columns, hidden=tuple(columns))
        return run.logits[columns.index(1 + index)]

    ours = turbo.score_variants(WILD_TYPE, VARIANTS, arm="frozen", refresh=refresh)
    assert_close(ours, expected_scores(turbo, logits_at))
    assert (ours.arm, ours.preset, ours.refresh) == ("frozen", "exact", width - 1)


def test_frozen_wild_type_marginals_are_exact(turbo: TurboEsm) -> None:
    """A residue at its own position sees what it saw in the prefill, so freezing costs nothing."""
    full = turbo.score_variants(WILD_TYPE, VARIANTS, method="wild_type", arm="full")
    assert_close(turbo.score_variants(WILD_TYPE, VARIANTS, method="wild_type", arm="frozen"), full.values)
    ours = turbo.score_variants(WILD_TYPE, VARIANTS, method="wild_type")
    assert 1e-4 < np.abs(np.array(ours.values) - np.array(full.values)).max() < 1
    assert ours.refresh == 0


@pytest.mark.parametrize("method", ["masked", "wild_type"])
def test_turbo_reads_the_compressed_protein_as_the_slow_backend_does(
    turbo: TurboEsm, slow: TurboEsm, method: str
) -> None:
    ours = turbo.score_variants(WILD_TYPE, VARIANTS, method=method)
    assert_close(ours, slow.score_variants(WILD_TYPE, VARIANTS, method=method).values)
    assert (ours.arm, ours.preset) == ("turbo", turbo.model.esm.turbo_config.name)


@torch.no_grad()
def test_pseudo_perplexities_are_those_of_whole_variants(turbo: TurboEsm, mini_hf: EsmForMaskedLM) -> None:
    variants = ["p.(Ser13Trp)", "K2_T3del", "K2_T3insQS:G28D", "M1M"]
    sequences = [
        "MKTAYIAKQRQIWFVKSHFSRQLEERLG",
        "MAYIAKQRQISFVKSHFSRQLEERLG",
        "MKQSTAYIAKQRQISFVKSHFSRQLEERLD",
        WILD_TYPE,
    ]

    def mean(sequence: str) -> float:
        ids = turbo.tokenizer(sequence, return_tensors="pt").input_ids
        rows = ids.repeat(len(sequence), 1).scatter(1, torch.arange(1, len(sequence) + 1)[:, None], MASK)
        log_probs = mini_hf(rows).logits.double().log_softmax(-1)
        return float(sum(log_probs[i, 1 + i, ids[0, 1 + i]] for i in range(len(sequence)))) / len(sequence)

    expected = [mean(one) - mean(WILD_TYPE) for one in sequences]
    calls: list[tuple[str, int, int]] = []
    full = turbo.score_variants(
        WILD_TYPE, variants, method="pseudo_perplexity", arm="full", progress=lambda *call: calls.append(call)
    )
    assert_close(full, expected)
    # The wild type is one of the four sequences, and is run once.
    assert calls[-1] == ("score", 28 + 28 + 26 + 30, 28 + 28 + 26 + 30)
    assert list(full.rows())[1][:4] == ("K2_T3del", "2_3", "K_T", "del")
    # With every other residue refreshed, a frozen context holds nothing of the residue that is masked but its columns.
    options = {"method": "pseudo_perplexity", "arm": "frozen"}
    ours, more, most = (turbo.score_variants(WILD_TYPE, variants, **options, refresh=each) for each in (27, 28, 500))
    assert 0 < np.abs(np.array(ours.values) - np.array(full.values)).max() < 0.05
    # An insertion has more residues to refresh than the wild type.
    other = (np.abs(np.array(one.values) - np.array(most.values)) > TOLERANCE for one in (ours, more))
    assert [each.tolist() for each in other] == [[False, False, True, False]] * 2 and most.refresh == 27
    with pytest.raises(ValueError, match="K2_T3del has no marginals"):
        turbo.score_variants(WILD_TYPE, variants)
    with pytest.raises(ValueError, match="give its residues"):
        turbo.score_variants(turbo.prefill(WILD_TYPE), variants, method="pseudo_perplexity")


def test_residues_that_stand_for_several_are_left_out_of_pseudo_perplexities(turbo: TurboEsm) -> None:
    calls: list[tuple[str, int, int]] = []
    turbo.score_variants("MKXT", "K2A", method="pseudo_perplexity", progress=lambda *call: calls.append(call))
    assert calls[-1] == ("score", 6, 6)
    with pytest.raises(ValueError, match="no residue that is known"):
        turbo.score_variants("XX", "X1A", method="pseudo_perplexity")


def test_refreshing_neighbours_brings_the_frozen_arm_closer(turbo: TurboEsm) -> None:
    full = np.array(turbo.score_variants(WILD_TYPE, arm="full").values)
    errors = []
    for refresh in (0, 8, len(WILD_TYPE) - 1):
        ours = turbo.score_variants(WILD_TYPE, arm="frozen", refresh=refresh).values
        errors.append(float(np.abs(np.array(ours) - full).mean()))
    assert errors[2] < errors[1] < errors[0]


def test_a_given_cache_is_read_and_not_changed(turbo: TurboEsm) -> None:
    ids = turbo.tokenizer(WILD_TYPE, return_tensors="pt").input_ids
    with torch.no_grad():
        cache = turbo.model(ids, use_cache=True).past_key_values
    ours = turbo.score_variants(cache, VARIANTS)
    assert ours == turbo.score_variants(WILD_TYPE, VARIANTS)
    assert cache.lengths.tolist() == [len(WILD_TYPE) + 2]
    # Without <eos>, as turbo.prefill makes it, the context differs.
    other = turbo.score_variants(turbo.prefill(WILD_TYPE), VARIANTS)
    assert other.wild_type == WILD_TYPE
    assert 0 < np.abs(np.array(other.values) - np.array(ours.values)).max() < 1


def test_invalid_caches(turbo: TurboEsm) -> None:
    with pytest.raises(ValueError, match="is for arm 'turbo', not 'frozen'"):
        turbo.score_variants(turbo.prefill(WILD_TYPE), VARIANTS, arm="frozen")
    with pytest.raises(ValueError, match="one row, this one has 2"):
        turbo.score_variants(turbo.prefill([WILD_TYPE] * 2), VARIANTS)
    cut = turbo.prefill(WILD_TYPE)
    cut.crop(1)
    for cache in (cut, turbo.prefill("MK<mask>T")):
        with pytest.raises(ValueError, match="does not hold a whole protein"):
            turbo.score_variants(cache, ["M1A"])


@settings(max_examples=10, deadline=None)
@given(
    chosen=st.lists(st.sampled_from(all_substitutions(WILD_TYPE)), min_size=1, max_size=4),
    toks_per_batch=st.integers(1, 200),
    arm=st.sampled_from(["full", "frozen", "turbo"]),
    method=st.sampled_from(["masked", "wild_type", "pseudo_perplexity"]),
)
def test_a_score_does_not_depend_on_the_batch(
    turbo: TurboEsm, chosen: list[str], toks_per_batch: int, arm: str, method: str
) -> None:
    options = {"arm": arm, "method": method}
    together = turbo.score_variants(WILD_TYPE, chosen, toks_per_batch=toks_per_batch, **options)
    assert [one.variant for one in together.scores] == chosen
    for variant, one in zip(chosen, together.scores, strict=True):
        alone = turbo.score_variants(WILD_TYPE, variant, **options)
        assert one.score == pytest.approx(alone.scores[0].score, abs=TOLERANCE)


def test_positions_below_one(turbo: TurboEsm) -> None:
    """Residues before the first one of the mature protein, for example of a tag."""
    everything = turbo.score_variants("MKT", first_position=-1)
    assert [one.variant for one in everything.scores[::19]] == ["M-1A", "K0A", "T1A"]
    assert everything.values == turbo.score_variants("MKT").values
    assert everything.to_dict()["variants"][0] == {"variant": "M-1A", "score": everything.values[0]}
    with pytest.raises(ValueError, match="position -2 lies outside the protein, -1 to 1"):
        turbo.score_variants("MKT", "M-2A", first_position=-1)


def test_progress_counts_every_position_once(turbo: TurboEsm) -> None:
    calls: list[tuple[str, int, int]] = []
    turbo.score_variants(WILD_TYPE, VARIANTS, toks_per_batch=20, progress=lambda *call: calls.append(call))
    assert calls == [("score", done, 4) for done in (2, 4)]
