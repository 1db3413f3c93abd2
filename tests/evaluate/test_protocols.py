"""Leave-one-out and extension, against slow computations one token at a time."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo import TurboConfig, TurboEsm
from esm_turbo.evaluate import Evaluation, TokenAccuracy, protocols
from tests.helpers.evaluation import OFF, SEQUENCES, cache_of, check, ids_of


class Arms(defaultdict[tuple[str, bool], list[tuple[Tensor, Tensor]]]):
    """Hidden states and logits of tokens, by what computed them and whether they are special."""

    def __init__(self) -> None:
        super().__init__(list)

    def check(self, freezing: TokenAccuracy, quantisation: TokenAccuracy, total: TokenAccuracy) -> None:
        """Compare figures with those of the tokens."""
        for special, name in ((False, "residues"), (True, "special_tokens")):
            full, exact, paper = (self[arm, special] for arm in ("full", "exact", "paper"))
            check(getattr(freezing, name), full, exact)
            check(getattr(quantisation, name), exact, paper)
            check(getattr(total, name), full, paper)


@torch.no_grad()
def test_leave_one_out_equals_one_extension_per_token(tiny: TurboEsm, evaluation: Evaluation) -> None:
    arms = Arms()
    for sequence in SEQUENCES:
        ids = ids_of(tiny, sequence)
        n = ids.shape[1]
        full = tiny.model(ids, output_hidden_states=True)
        caches = {preset: cache_of(tiny, ids, preset) for preset in ("exact", "paper")}
        for i in range(n):
            special = i in (0, n - 1)
            arms["full", special].append((full.hidden_states[-1][0, i], full.logits[0, i]))
            mask = torch.ones(1, n + 1, dtype=torch.int64)
            mask[0, i] = 0
            for preset, cache in caches.items():
                out = tiny.model(
                    ids[:, i : i + 1],
                    mask,
                    torch.tensor([[i]]),
                    past_key_values=cache,
                    output_hidden_states=True,
                )
                arms[preset, special].append((out.hidden_states[-1][0, 0], out.logits[0, 0]))
    loo = evaluation["paper"].leave_one_out
    arms.check(evaluation.frozen.leave_one_out, loo.against_frozen, loo.against_full)


def test_special_tokens_in_half_precision_are_measured(tiny: TurboEsm) -> None:
    """The codec `exact` with other options is not the exact cache."""
    config = TurboConfig(codec="exact", protect_special_tokens=True)
    found = tiny.evaluate(SEQUENCES[:1], [config], extend_ks=(1,), refresh_ws=(0,)).presets[0]
    for one in (found.leave_one_out, found.extend[0]):
        assert one.against_frozen.residues.relative_rms_error > 0


def test_leave_one_out_does_not_depend_on_the_chunk_size(
    tiny: TurboEsm, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols, "_ROWS", 5)
    chunked = tiny.evaluate(SEQUENCES, ["paper"], **OFF)["paper"].leave_one_out
    whole = evaluation["paper"].leave_one_out
    assert dataclasses.asdict(chunked.against_frozen) == _approx(whole.against_frozen)


def _approx(accuracy: TokenAccuracy) -> dict[str, Any]:
    figures = dataclasses.asdict(accuracy)
    return {part: pytest.approx(values, rel=1e-3, abs=1e-6) for part, values in figures.items()}


def test_frozen_equals_full_under_leave_one_out(evaluation: Evaluation) -> None:
    for accuracy in (evaluation.frozen.leave_one_out.residues, evaluation.frozen.leave_one_out.special_tokens):
        assert accuracy.relative_rms_error < 1e-5
        assert accuracy.kl_q99 < 1e-9
        assert accuracy.top1_agreement == 1.0


def test_only_compressed_caches_have_a_quantisation_error(evaluation: Evaluation) -> None:
    exact, paper = evaluation["exact"], evaluation["paper"]
    assert exact.leave_one_out.against_frozen.residues.relative_rms_error == 0.0
    assert exact.leave_one_out.against_frozen.residues.kl_mean == 0.0
    assert exact.leave_one_out.against_full == evaluation.frozen.leave_one_out
    assert paper.leave_one_out.against_frozen.residues.relative_rms_error > 1e-3
    assert paper.leave_one_out.against_frozen.residues.kl_mean > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("w", [0, 8, 32])
@pytest.mark.parametrize("k", [1, 18])
def test_extension_equals_one_protein_at_a_time(tiny: TurboEsm, evaluation: Evaluation, k: int, w: int) -> None:
    arms = Arms()
    for sequence in SEQUENCES:
        if len(sequence) <= k:
            continue
        ids = ids_of(tiny, sequence)
        full = tiny.model(ids, output_hidden_states=True)
        outputs = {"full": (full.hidden_states[-1][0, -k - 1 :], full.logits[0, -k - 1 :])}
        for preset in ("exact", "paper"):
            extended = tiny.extend(cache_of(tiny, ids[:, : -k - 1], preset), sequence[-k:], refresh=w)
            outputs[preset] = (extended.hidden_states[0], extended.logits[0])
        for arm, (hidden, logits) in outputs.items():
            for i in range(k + 1):
                arms[arm, i == k].append((hidden[i], logits[i]))
    [frozen] = [f for f in evaluation.frozen.extend if (f.new_residues, f.refreshed) == (k, w)]
    [extend] = [e for e in evaluation["paper"].extend if (e.new_residues, e.refreshed) == (k, w)]
    arms.check(frozen.against_full, extend.against_frozen, extend.against_full)


def test_refreshing_more_residues_reduces_the_freezing_error(evaluation: Evaluation) -> None:
    errors = {
        f.refreshed: f.against_full.residues.relative_rms_error
        for f in evaluation.frozen.extend
        if f.new_residues == 1 and f.against_full
    }
    # Beyond the length of the context all residues are recomputed; only `<cls>` stays frozen.
    assert errors[32] < errors[8] < errors[0]


def test_a_number_given_twice_is_measured_once(tiny: TurboEsm, evaluation: Evaluation) -> None:
    result = tiny.evaluate(SEQUENCES, ["paper"], extend_ks=(1, 1), refresh_ws=(0, 0))
    [extend] = result["paper"].extend
    assert extend.against_frozen and extend.against_frozen.residues.tokens == len(SEQUENCES)


def test_short_proteins_are_skipped_and_counted(tiny: TurboEsm, evaluation: Evaluation) -> None:
    counts = {e.new_residues: (e.proteins, e.skipped) for e in evaluation["paper"].extend}
    assert counts == {1: (4, 0), 18: (2, 2)}
    nothing = tiny.evaluate(["MA", "MKT"], ["paper"], extend_ks=(3,), refresh_ws=(0,))
    [extend] = nothing["paper"].extend
    assert (extend.proteins, extend.skipped) == (0, 2)
    assert extend.against_frozen is extend.against_full is nothing.frozen.extend[0].against_full is None
    assert nothing.to_dict()["presets"][0]["extend"][0]["against_frozen"] is None


def test_non_finite_outputs_name_preset_and_protein(tiny: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = protocols.extend_each_token

    def broken(model: Any, cache: Any, input_ids: Tensor, layers: bool) -> Any:
        outputs = honest(model, cache, input_ids, layers)
        if cache.config.codec != "exact" and len(input_ids) == len(SEQUENCES[1]) + 2:
            outputs.hidden[2, 0] = np.nan
        return outputs

    monkeypatch.setattr(protocols, "extend_each_token", broken)
    with pytest.raises(ValueError, match="leave-one-out, paper against frozen, sequence 2: the output holds NaN"):
        tiny.evaluate(SEQUENCES, ["paper"], **OFF)
