"""Tables of variants for ProteinGym and dms-viz."""

from __future__ import annotations

import csv
import io

import pytest

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.variants.records import MeasuredVariant, ProteinVariants, VariantsRun
from esm_turbo.tasks.variants.score import VariantScore, VariantScores

VARIANTS = ["m24a", "K25R:T26N", "M24A"]


def result(arms: list[str], measured: float | None = None, name: str = "wt") -> ProteinVariants:
    scores = {
        arm: VariantScores(
            tuple(VariantScore(variant, number - 2.5) for number, variant in enumerate(VARIANTS)),
            "MKT", "masked", arm, None, 0, "m", 24,
        )
        for arm in arms
    }  # fmt: skip
    variants = tuple(MeasuredVariant(one, measured if index == 1 else None) for index, one in enumerate(VARIANTS))
    return ProteinVariants(ProteinRecord(name, "MKT"), 24, variants, scores)


def written(*results: ProteinVariants, columns: str) -> list[list[str]]:
    out = io.StringIO()
    VariantsRun(list(results)).write(out, columns=columns)
    return list(csv.reader(io.StringIO(out.getvalue())))


def test_proteingym_names_the_mutated_sequence() -> None:
    assert written(result(["turbo"]), columns="proteingym") == [
        ["mutant", "mutated_sequence", "score"],
        ["M24A", "AKT", "-2.5"],
        ["K25R:T26N", "MRN", "-1.5"],
        ["M24A", "AKT", "-0.5"],
    ]


def test_proteingym_with_measurements_and_arms() -> None:
    found = written(result(["turbo", "full"], 0.5), columns="proteingym")
    assert found[0] == ["mutant", "mutated_sequence", "score_turbo", "score_full", "DMS_score"]
    assert [row[4] for row in found[1:]] == ["", "0.5", ""]


def test_dms_viz_has_one_row_for_each_substitution_and_condition() -> None:
    assert written(result(["turbo"]), columns="dms-viz") == [
        ["site", "wildtype", "mutant", "score"], ["24", "M", "A", "-2.5"],
    ]  # fmt: skip
    assert written(result(["turbo", "full"]), columns="dms-viz") == [
        ["site", "wildtype", "mutant", "score", "condition"],
        ["24", "M", "A", "-2.5", "turbo"],
        ["24", "M", "A", "-2.5", "full"],
    ]


@pytest.mark.parametrize("columns", ["proteingym", "dms-viz"])
def test_several_proteins_are_told_apart(columns: str) -> None:
    found = written(result(["turbo"]), result(["turbo"], name="two"), columns=columns)
    assert found[0][0] == "protein" and {row[0] for row in found[1:]} == {"wt", "two"}


def test_variants_of_several_substitutions_alone_are_nothing_for_dms_viz() -> None:
    from esm_turbo.tasks.variants.formats import check_columns

    with pytest.raises(ValueError, match="dms-viz shows single substitutions, and no variant is one"):
        check_columns("dms-viz", ["K25R:T26N"])
    check_columns("proteingym", ["K25R:T26N"])
