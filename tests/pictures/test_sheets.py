"""Every kind of result has sheets; logos of designs."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo.pictures.logo import design_entropies, design_frequencies, logo_sheet
from esm_turbo.pictures.palettes import RESIDUE_ORDER
from esm_turbo.pictures.sheets import sheets_of
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.generation.generate import GenerationOutput
from esm_turbo.tasks.scoring.records import ScoringRun
from esm_turbo.tasks.variants.records import VariantsRun
from tests.pictures.conftest import ODD


def test_results_in_python_name_their_arm(turbo) -> None:
    [variants] = sheets_of(turbo.score_variants("MKTAY", first_position=24, method="wild_type"), None)
    assert (
        "model esm2-mini, arm turbo (preset turbo3)" in variants.caption and "wild-type marginals" in variants.caption
    )
    assert variants.layout[0].columns == [24, 25, 26, 27, 28]
    [scores] = sheets_of(turbo.score("MKTAY", ["GS", "GSGS"], arm="frozen"), None)
    assert "2 candidates" in scores.title and "arm frozen (preset exact)" in scores.caption


def test_runs_have_a_sheet_for_each_protein(variants, ranking, designs) -> None:
    assert len(sheets_of(VariantsRun([variants, variants]), None)) == 2
    assert len(sheets_of(ScoringRun([ranking]), None)) == 1
    assert len(sheets_of(designs, None)) == 1
    for given, letters in (("other", ["", "", ""]), (ODD, ["C", "D", "H"])):
        [found] = sheets_of(designs, None, [ProteinRecord(given, "ACDEFGHI")])
        assert found.layout[0].letters == letters


def test_rows_of_generated_sequences_are_divided_by_their_input() -> None:
    rows = ["AAG", "ACG", "TTG", "TWG"]
    output = GenerationOutput(rows, [[2]] * 4, [[-1.0]] * 4)
    first, second = sheets_of(output, None)
    assert first.title.startswith("protein 1: 2 designs") and second.title.startswith("protein 2: 2 designs")
    # Such results do not know their seeds.
    assert "seed" not in second.table.columns and [row[3] for row in second.table.rows] == ["TTG", "TWG"]


def test_a_mask_that_stays_is_one_residue() -> None:
    output = GenerationOutput(["M<mask>KAC", "M<mask>KGC"], [[4]] * 2, [[-1.0]] * 2)
    [found] = sheets_of(output, None)
    assert [row[1] for row in found.table.rows] == ["A", "G"]


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`draw` draws VariantScores, .*; got str"):
        sheets_of("MKTAY", None)


def test_shares_and_entropies_of_designs(designs) -> None:
    shares = design_frequencies([[one.sequence[p - 1] for p in one.positions] for one in designs])
    assert shares.shape == (3, 20)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    found = [{RESIDUE_ORDER[i]: row[i] for i in np.flatnonzero(row)} for row in shares]
    assert found == [{"A": 1.0}, {"A": 0.5, "C": 0.25, "G": 0.25}, {"W": 0.75, "H": 0.25}]
    entropies = design_entropies(shares)
    assert entropies.tolist() == pytest.approx([0.0, 1.5, 0.8112781])
    assert not np.signbit(entropies).any()
    # Nine of ten are A, and one is X.
    shares = design_frequencies([["A"]] * 9 + [["X"]])
    assert shares.sum() == pytest.approx(0.9) and design_entropies(shares).tolist() == pytest.approx([0.4689956])


def test_a_sheet_compares_with_the_input(designs) -> None:
    [tracks] = logo_sheet(designs, "ACDEFGHI", "model x").layout
    _, entropy, log_probs, kept = tracks.panels
    assert tracks.columns == [2, 3, 7] and tracks.letters == ["C", "D", "H"]
    assert kept.series["kept"].tolist() == [0.0, 0.0, 0.25]
    assert log_probs.series["mean log p"].tolist() == [-1.0, -2.0, -3.0]
    assert entropy.series["entropy"][1] == 1.5


def test_residues_after_the_input_have_no_letter_below(designs) -> None:
    sheet = logo_sheet(designs, "A", "model x")
    [tracks] = sheet.layout
    assert tracks.letters == ["", "", ""] and len(tracks.panels) == 3
    assert sheet.table.columns[3] == "seed" and [row[3] for row in sheet.table.rows] == [2**62 + n for n in range(1, 5)]
