"""Experiments on accuracy, on few proteins."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.accuracy import long_proteins, screening, sizes, specificity, variant_effects
from benchmarks.accuracy.presets import preset_cases
from benchmarks.harness import embedded
from benchmarks.harness.names import variant_arms
from esm_turbo import TurboEsm
from esm_turbo.config import PRESETS, Geometry
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord
from esm_turbo.tasks.embedding.windows import Windows
from esm_turbo.tasks.scoring.pairs import PairScores
from esm_turbo.tasks.scoring.score import CandidateScore, Scores
from esm_turbo.tasks.variants.records import read_variants
from tests.helpers.benchmark_cases import measured


def test_every_preset_has_a_row_with_all_its_figures() -> None:
    [case] = preset_cases({name: PRESETS[name] for name in ("exact", "paper")}, ("paper_six",), 1)
    assert case.name == "paper_six" and case.check().passed
    exact, paper = case.measure(1)
    for row in (exact, paper):
        assert row["proteins"] == "paper_six.fasta"
        assert row["provenance"]["residues"] == 30
        assert row["provenance"]["calibration"]["sequences"] == 640
    assert exact["preset"]["leave_one_out"]["against_frozen"]["residues"]["kl_mean"] == 0
    preset = paper["preset"]
    assert (exact["preset"]["name"], preset["name"]) == ("exact", "paper")
    assert preset["memory"]["bits_per_element"] == pytest.approx(4, abs=0.01)
    assert preset["leave_one_out"]["against_frozen"]["residues"]["tokens"] == 30
    assert preset["leave_one_out"]["against_frozen"]["residues"]["kl_mean"] > 0
    assert len(preset["leave_one_out"]["by_layer"]) == 12
    sizes = [(e["new_residues"], e["refreshed"]) for e in preset["extend"]]
    assert sizes == [(k, w) for k in (1, 8, 32) for w in (0, 8, 32)]


def test_bytes_in_the_geometry_of_650m() -> None:
    [one] = sizes.memory_cases({"650M": Geometry(33, 20, 64)})
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    presets = row["presets"]
    assert presets["fp32"]["bytes"] == 330 * 2**20
    assert presets["paper"]["bits_per_element"] == pytest.approx(4, abs=0.001)
    for bits in (4, 3, 2, 1):
        assert presets[f"turbo{bits}"]["bits_per_element"] <= bits + 0.05


def test_windows_are_compared_with_the_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_proteins, "evaluation_set", lambda name, most: embedded.evaluation_set("paper_six")[1:2])
    plain, memory = long_proteins.accuracy_cases([Windows(64, 16, 0), Windows(64, 16, 32)], ("exact",))
    assert (plain.name, memory.name) == (
        "window 64, overlap 16, memory none",
        "window 64, overlap 16, memory 32 as exact",
    )
    found = [measured(case) for case in (plain, memory)]
    residues = len(embedded.evaluation_set("paper_six")[1].sequence)
    for figures in found:
        assert figures["against_full"]["tokens"] == residues
    assert found[1]["against_full"]["cosine_mean"] > found[0]["against_full"]["cosine_mean"]


def test_peaks_are_those_of_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_process(module: str, residues: int, *cut: int) -> dict:
        assert (module, cut) == ("benchmarks.accuracy.long_proteins", (511, 64, 511))
        return {"loaded": 5, "peak": 10 * residues, "output": 4 * residues, "seconds": 2.0}

    monkeypatch.setattr(long_proteins, "in_process", in_process)
    [case] = long_proteins.process_cases(Windows(511, 64, 511), residues=(100, 150))
    figures = case.measure(1)
    assert figures["bytes_without_output"] == {"100": 600, "150": 900}
    assert figures["growth"] == {"peak without the output": 1.5}
    assert figures["residues_per_second"] == {"100": 50.0, "150": 75.0}


def test_every_target_has_its_peptide_and_decoys() -> None:
    made = screening.screens()
    assert len({screen.name for screen in made}) == 92
    lengths = [len(screen.target) for screen in made]
    assert lengths == sorted(lengths)
    peptides = {screen.candidates[0] for screen in made}
    for screen in made:
        own, *decoys = screen.candidates
        shuffled, swapped = decoys[: screening.SHUFFLED], decoys[screening.SHUFFLED :]
        assert len(swapped) == screening.SWAPPED == len(set(swapped))
        assert all(Counter(one) == Counter(own) for one in shuffled)
        assert set(swapped) <= peptides - {own}
    assert screening.screens() == made


def test_a_selection_of_targets_covers_all_lengths() -> None:
    made, some = screening.screens(), screening.screens(10)
    assert len(some) == 10 and some[0] == made[0]
    assert len(some[-1].target) > 500
    cases = list(screening.cases(10))
    assert [case.name for case in cases] == [f"group {i} of 10" for i in range(1, 11)]
    assert len(list(screening.cases())) == 23


def test_the_share_of_decoys_ranked_below() -> None:
    assert screening._ahead(1.0, [2.0, 1.0, 0.5, 3.0]) == 0.625


def test_the_preset_is_restored(turbo: TurboEsm) -> None:
    before = turbo.model.esm.turbo_config
    assert screening.with_preset(turbo, "turbo1", lambda: turbo.model.esm.turbo_config.name) == "turbo1"
    with pytest.raises(RuntimeError):
        screening.with_preset(turbo, "exact", lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert turbo.model.esm.turbo_config == before


def scores(*values: float) -> Scores:
    ones = (CandidateScore(name, (value,)) for name, value in zip("ACDEF", values, strict=True))
    return Scores(tuple(ones), "frozen", "exact", "masked", 8, "m")


def test_percentiles_first_places_and_resemblance_of_rankings() -> None:
    found = PairScores((scores(-1, -2, -3, -4, -5), scores(-5, -2, -2, -3, -4)), {})
    places = specificity.places(found, [0, 0, 1], ["A", "D", "C"], lambda one: one.mean_log_probability)
    assert places["percentiles"] == [0, 0.5, 0.125] and places["first"] == 1
    # Ranks 5 to 1 against 1, 4.5, 4.5, 3, 2: (44.5 - 45) / sqrt(10 * 9.5).
    assert places["between_targets"] == pytest.approx(-0.0513, abs=1e-4)


def test_one_case_of_all_targets() -> None:
    [pairs] = specificity.cases()
    assert pairs.shape == {"dtype": "float32", "targets": 92, "candidates": 92}
    assert [case.shape["targets"] for case in specificity.cases(5)] == [5]


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
