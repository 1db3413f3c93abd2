"""Variant effects in the three arms."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.accuracy import variant_effects
from benchmarks.harness import embedded
from benchmarks.harness.names import variant_arms
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord
from esm_turbo.tasks.variants.records import read_variants


@pytest.fixture
def few_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("full, masked", "frozen, wild_type", "turbo3, masked, 8")
    arms = {name: variant_arms()[name] for name in chosen}
    monkeypatch.setattr(variant_effects, "variant_arms", lambda: arms)


def test_leakage_is_that_of_the_predictions(few_arms: None) -> None:
    sequence = "MKTAYIAKQR"
    found = variant_effects._leak([ProteinRecord("a", sequence)])
    assert (found["tested"], found["positions"]) == (1, 10)
    assert found["arms"]["full, masked"]["wild_type_gain"] == 0
    assert found["arms"]["full, masked"]["divergence"] == 0
    gains = []
    for position, wild_type in enumerate(sequence, start=1):
        names = [f"{wild_type}{position}{letter}" for letter in STANDARD_RESIDUES]
        logs = {}
        for arm, method in (("full", "masked"), ("frozen", "wild_type")):
            values = np.array(embedded.embedded().score_variants(sequence, names, arm=arm, method=method).values)
            logs[arm] = (values - np.logaddexp.reduce(values))[STANDARD_RESIDUES.index(wild_type)]
        gains.append(logs["frozen"] - logs["full"])
    assert found["arms"]["frozen, wild_type"]["wild_type_gain"] == pytest.approx(np.mean(gains), abs=1e-4)
    assert np.mean(gains) > 0


def test_fitness_is_correlated_with_every_arm(few_arms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_effects, "read_variants", lambda *a, **k: (read_variants(*a, **k)[0][:30], []))
    fitness, _ = variant_effects.cases(1)
    figures = fitness.measure(1)
    assert isinstance(figures, dict)
    assert (figures["variants"], figures["residues"]) == (30, 263)
    assert figures["arms"]["full, masked"]["spearman_with_full"] == 1.0
    for arm in figures["arms"].values():
        assert -1 <= arm["spearman_with_measured"] <= 1
