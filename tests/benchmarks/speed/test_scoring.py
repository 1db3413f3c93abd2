"""What the benchmarks of scoring are made of: decoys, presets in turn, and which records a table takes."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.accuracy import screening
from benchmarks.harness import names, records, stored
from benchmarks.harness.measure import Case
from benchmarks.report import tables_scoring
from benchmarks.speed import scoring
from esm_turbo import TurboEsm


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


def test_a_part_of_the_targets_covers_all_lengths() -> None:
    made, some = screening.screens(), screening.screens(10)
    assert len(some) == 10 and some[0] == made[0]
    assert len(some[-1].target) > 500
    cases = list(screening.cases(10))
    assert [case.name for case in cases] == [f"group {i} of 10" for i in range(1, 11)]
    assert len(list(screening.cases())) == 23


def test_places_among_decoys() -> None:
    assert screening._ahead(1.0, [2.0, 1.0, 0.5, 3.0]) == 0.625


def test_a_preset_is_put_back(turbo: TurboEsm) -> None:
    before = turbo.model.esm.turbo_config
    assert screening.with_preset(turbo, "turbo1", lambda: turbo.model.esm.turbo_config.name) == "turbo1"
    with pytest.raises(RuntimeError):
        screening.with_preset(turbo, "exact", lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert turbo.model.esm.turbo_config == before


def test_arms_include_the_defaults() -> None:
    assert {"frozen, masked, 8", "frozen, empty, 8", "turbo3, masked, 8", "turbo1, masked, 8"} <= set(
        names.screening_arms()
    )
    assert {"full, masked", "full, wild_type", "turbo3, masked, 8"} <= set(names.variant_arms())


def test_a_speed_row_is_checked_and_puts_context_and_candidates_together() -> None:
    [case] = scoring.candidate_cases(
        None,
        target_residues=40,
        candidate_residues=3,
        full_candidates=1,
        cached_candidates=2,
        refreshes=(0, 8),
        at_least=1.0,
    )
    assert isinstance(case, Case) and case.check().passed
    figures = case.measure(1)
    context, each = figures["seconds"]["context turbo"]["p50"], figures["seconds"]["turbo, 8 refreshed"]["p50"] / 2
    rate = figures["candidates_per_second"]["turbo, 8 refreshed, 20 candidates"]
    assert rate == pytest.approx(20 / (context + 20 * each))
    ratio = figures["ratios"]["turbo, 8 refreshed, 20 candidates / full"]
    assert ratio == pytest.approx(rate / figures["candidates_per_second"]["full"])
    assert case.targets[0].judge(figures)["at_least"] == 1.0


def test_all_positions_are_counted() -> None:
    [case] = scoring.position_cases(None, residues=30, full_positions=3, cached_positions=5, refreshes=(0,))
    assert case.check().passed
    figures = case.measure(1)
    assert figures["seconds_for_all_positions"]["full"] == pytest.approx(10 * figures["seconds"]["full"]["p50"])


def test_nothing_runs_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sizes = {"target_residues": 40, "candidate_residues": 3, "full_candidates": 1, "cached_candidates": 1}
    assert list(scoring.candidate_cases(None, **sizes, device="cuda", at_least=1.0)) == []


def test_a_table_takes_one_run_and_no_older_groups(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    stored.forget()
    try:
        for limit, spearman in ((8, 0.1), (None, 0.9)):
            for group in (1, 2):
                arms = {"full": {"ahead_of_shuffled": 0.5}, "frozen, masked, 8": {"spearman": spearman}}
                row = {
                    "case": f"group {group} of 2",
                    "shape": {"max_targets": limit},
                    "targets_scored": [{"target": "x", "arms": arms}],
                }
                records.append(tmp_path / "screening.jsonl", "screening", row)
        # The newest run is told by its date, of which two in one second would be equal.
        lines = (tmp_path / "screening.jsonl").read_text().splitlines()
        old = [line.replace('"date": "2', '"date": "1') for line in lines[:2]]
        (tmp_path / "screening.jsonl").write_text("\n".join([*old, *lines[2:]]) + "\n")
        assert len(tables_scoring.screening_records()) == 2
        assert tables_scoring.screened()["frozen, masked, 8"] == {"spearman": 0.9, "lowest_spearman": 0.9}
    finally:
        stored.forget()
