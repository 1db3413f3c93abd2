"""Every kind of result has sheets."""

from __future__ import annotations

import pytest

from esm_turbo.pictures.sheets import design_sheets, sheets_of
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.generation.generate import GenerationOutput
from esm_turbo.tasks.scoring.records import ScoringRun
from esm_turbo.tasks.variants.records import VariantsRun


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
    other = ProteinRecord("other", "ACDEFGHI")
    found = design_sheets(designs, [other], None)
    assert found[0].layout[0].letters == ["", "", ""]


def test_rows_of_generated_sequences_are_divided_by_their_input() -> None:
    rows = ["AAG", "ACG", "TTG", "TWG"]
    output = GenerationOutput(rows, [[2]] * 4, [[-1.0]] * 4)
    first, second = sheets_of(output, None)
    assert first.title.startswith("protein 1: 2 designs") and second.title.startswith("protein 2: 2 designs")
    assert [row[4] for row in second.table.rows] == ["TTG", "TWG"]


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`draw` draws VariantScores, .*; got str"):
        sheets_of("MKTAY", None)
