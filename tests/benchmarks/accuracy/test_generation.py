"""Predictions of generation against full recomputation."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import generation
from benchmarks.accuracy.generation import Refresh
from tests.helpers.benchmark_cases import measured


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps on one protein, and nothing kept from other runs."""
    monkeypatch.setattr(generation, "_NEW", 3)
    monkeypatch.setattr(generation, "_LOOP", 3)
    monkeypatch.setattr(generation, "_cached", {})
    generation.check.cache_clear()


def test_every_kind_setting_and_preset_has_a_row() -> None:
    names = [case.name for case in generation.cases([Refresh(8, 1)], [Refresh(8, 2)], ("exact", "turbo3"), 1)]
    assert len(names) == len(set(names)) == 6
    assert names[0] == "to the right, refresh 8 every 1, exact"


def test_refreshing_everything_equals_the_full_run() -> None:
    for case in generation.cases([Refresh(10_000, 1)], [Refresh(10_000, 1)], ("exact",), 1):
        figures = measured(case)
        assert figures["against_full"]["kl_mean"] < 1e-9
        assert figures["against_full"]["top1_agreement"] == 1.0
        assert figures["tokens_a_step"] == figures["tokens_a_step_in_full"]


def test_less_refreshing_runs_fewer_tokens_and_is_worse() -> None:
    [case, *_] = generation.cases([Refresh(0, 1)], [], ("exact",), 1)
    figures = measured(case)
    assert figures["tokens_a_step"] < figures["tokens_a_step_in_full"] / 10
    assert 0 < figures["against_full"]["kl_mean"] < 0.5
    assert 0 < figures["against_full"]["total_variation_mean"] < 0.5
