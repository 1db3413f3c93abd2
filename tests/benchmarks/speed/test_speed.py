"""Rows about speed: their arms, and the figures that follow from them, on small cases."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.measure import spread
from benchmarks.harness.names import EMBED, FILE_ORDER, SAME_BATCHES
from benchmarks.speed import calibration, context_store, embedding, identity, scoring, short_contexts
from tests.helpers.benchmark_cases import TINY, measured


def test_a_calibration_has_every_phase_and_the_size_of_the_file() -> None:
    [case] = calibration.embedded_cases(proteins=4, mib=9.0)
    assert case.shape["proteins"] == 4
    figures = measured(case, 1)
    phases = ("gather", "fit", "measure", "write")
    assert figures["first seconds"].keys() == figures["seconds"].keys() == {*phases, "all"}
    first = figures["first seconds"]
    assert first["all"] == pytest.approx(sum(first[phase] for phase in phases))
    assert 1 < figures["file MiB"] < 9


def test_reading_from_a_store_is_compared_with_the_prefill() -> None:
    [case] = context_store.random_cases(TINY, (30,), "turbo3")
    figures = measured(case, 1)
    assert figures["ratios"].keys() == {"prefill / disk", "prefill / host memory"}
    assert figures["bytes"]["file"] > figures["bytes"]["cache"] > 0


def test_calls_are_compared_with_those_that_recognise_no_model() -> None:
    [case] = identity.cases(TINY, 20, 3, "cpu", torch.float32, calls=2, at_most=1.02)
    figures = measured(case)
    seconds = figures["seconds"]
    assert len(seconds) == 7
    for arm in ("extension", "extension and its logits"):
        expected = seconds[arm]["p50"] / seconds[f"{arm} without checks"]["p50"]
        assert figures["ratios"][f"{arm} / without checks"] == pytest.approx(expected)


def test_embeddings_are_compared_with_both_loops() -> None:
    [case] = embedding.random_cases(TINY, proteins=3)
    figures = measured(case, 1)
    assert figures["seconds"].keys() == {SAME_BATCHES, FILE_ORDER, EMBED}
    rate = case.shape["residues"] / figures["seconds"][EMBED]["p50"]
    assert figures["residues_per_second"][EMBED] == pytest.approx(rate)


def test_a_wrong_embedding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = embedding.random_cases(TINY, proteins=2)
    honest = embedding._ours
    monkeypatch.setattr(embedding, "_ours", lambda *a: [(x + 0.01, mean) for x, mean in honest(*a)])
    assert not case.check().passed


def test_context_and_candidates_are_combined() -> None:
    [case] = scoring.candidate_cases(
        target_residues=40,
        candidate_residues=3,
        full_candidates=1,
        cached_candidates=2,
        refreshes=(0, 8),
        at_least=1.0,
    )
    figures = measured(case, 1)
    context, each = figures["seconds"]["context turbo"]["p50"], figures["seconds"]["turbo, 8 refreshed"]["p50"] / 2
    rate = figures["candidates_per_second"]["turbo, 8 refreshed, 20 candidates"]
    assert rate == pytest.approx(20 / (context + 20 * each))
    ratio = figures["ratios"]["turbo, 8 refreshed, 20 candidates / full"]
    assert ratio == pytest.approx(rate / figures["candidates_per_second"]["full"])
    assert case.targets[0].judge(figures)["at_least"] == 1.0


def test_all_positions_are_counted() -> None:
    [case] = scoring.position_cases(residues=30, full_positions=3, cached_positions=5, refreshes=(0,))
    figures = measured(case, 1)
    assert figures["seconds_for_all_positions"]["full"] == pytest.approx(10 * figures["seconds"]["full"]["p50"])


@pytest.mark.parametrize(("full", "break_even"), [(1.0, 0.8), (0.2, None)])
def test_a_short_context_has_its_break_even(
    monkeypatch: pytest.MonkeyPatch, full: float, break_even: float | None
) -> None:
    """For two candidates that take `full` seconds without a cache and 0.25 with one, after a prefill of 0.3."""
    times = spread({"full": [full], "turbo": [0.25], "prefill": [0.3]})
    monkeypatch.setattr(short_contexts, "timed", lambda arms, repeats: {name: times[name] for name in arms})
    [case] = short_contexts.cases((20,), candidates=2, candidate_residues=4, refresh=2)
    figures = measured(case, 1)
    assert figures["break_even_candidates"] == (None if break_even is None else pytest.approx(break_even))
    assert figures["ratios"]["full / turbo"] == pytest.approx(full / 0.25)
