"""Variants of a file: reading them, arms and measurements side by side, and the table that is written."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import spearmanr

from esm_turbo import TurboEsm
from esm_turbo.files.csv_files import CsvError
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common import memory
from esm_turbo.tasks.variants import records
from esm_turbo.tasks.variants.records import MeasuredVariant, read_variants, score_file
from esm_turbo.tasks.variants.score import VariantScore, VariantScores

WILD_TYPE = ProteinRecord("wt", "MKTAYIAK")
VARIANTS = [
    MeasuredVariant("M1A", 0.5),
    MeasuredVariant("K2R", -1.0),
    MeasuredVariant("T3S:K8G"),
    MeasuredVariant("Y5W", 2.0),
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "variants.csv"
    path.write_text("mutant,score,fitness\nM1A,1,0.5\nK2R,2,\nK1A,3,1\nT3S,x,7\nA4G,inf,8\n")
    return path


def test_variants_of_a_file(table: Path) -> None:
    good, bad = read_variants(table, WILD_TYPE)
    assert good == [
        MeasuredVariant("M1A", 0.5),
        MeasuredVariant("K2R"),
        MeasuredVariant("T3S", 7),
        MeasuredVariant("A4G", 8),
    ]
    assert [(one.record, one.reason) for one in bad] == [
        ("line 4", "'K1A': residue 1 is M; is 1 the position of the first residue?")
    ]


def test_measurements_of_another_column(table: Path) -> None:
    good, bad = read_variants(table, WILD_TYPE, measured="score")
    assert good == [MeasuredVariant("M1A", 1), MeasuredVariant("K2R", 2)]
    assert [one.reason for one in bad[1:]] == [
        "score is 'x', not a number; correct it or leave it empty",
        "score is 'inf', not finite; correct it or leave it empty",
    ]


def test_a_file_without_measurements(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Mutant\nM24A\n")
    assert read_variants(tmp_path / "a.csv", WILD_TYPE, first_position=24) == ([MeasuredVariant("M24A")], [])


@pytest.mark.parametrize(
    ("text", "measured", "message"),
    [
        ("mutant\n", None, "holds no variants; give at least one below the column names"),
        ("variant\nM1A\n", None, "lacks the column 'mutant'"),
        ("mutant\nM1A\n", "fitness", "lacks the column 'fitness'"),
    ],
)
def test_unusable_files(tmp_path: Path, text: str, measured: str | None, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(CsvError, match=message):
        read_variants(tmp_path / "a.csv", WILD_TYPE, measured=measured)


@pytest.mark.parametrize(("bad", "refused"), [(20, False), (21, True)])
def test_mostly_bad_variants_are_one_error(tmp_path: Path, bad: int, refused: bool) -> None:
    (tmp_path / "a.csv").write_text("mutant\n" + "K1A\n" * bad + "M1A\n" * 20)
    if not refused:
        assert len(read_variants(tmp_path / "a.csv", WILD_TYPE)[1]) == bad
        return
    message = "21 of 41 variants are not of wt; is 1 the position of its first residue\\? line 2: 'K1A': residue 1 is M"
    with pytest.raises(CsvError, match=message):
        read_variants(tmp_path / "a.csv", WILD_TYPE)


def test_every_arm_and_its_correlations(turbo: TurboEsm) -> None:
    calls: list[tuple[str, int, int]] = []
    run = score_file(turbo, WILD_TYPE, VARIANTS, ["turbo", "full"], progress=lambda *call: calls.append(call))
    names = [one.variant for one in VARIANTS]
    assert run.scores["turbo"] == turbo.score_variants(WILD_TYPE.sequence, names)
    assert run.scores["full"] == turbo.score_variants(WILD_TYPE.sequence, names, arm="full")
    assert [call for call in calls if call[1] == call[2]] == [("turbo", 5, 5), ("full", 5, 5)]
    turbo_scores, full_scores = (run.scores[arm].values for arm in ("turbo", "full"))
    measured = spearmanr([turbo_scores[i] for i in (0, 1, 3)], [0.5, -1.0, 2.0]).statistic
    assert run.against_measured("turbo") == pytest.approx(measured)
    assert run.against_full("turbo") == pytest.approx(spearmanr(turbo_scores, full_scores).statistic)
    assert run.against_full("full") == pytest.approx(1)
    facts = run.to_dict()
    assert (facts["variants"], set(facts["arms"])) == (4, {"turbo", "full"})
    assert facts["arms"]["turbo"]["spearman_with_measured"] == run.against_measured("turbo")


def test_correlations_that_are_undefined(turbo: TurboEsm) -> None:
    run = score_file(turbo, WILD_TYPE, [replace(one, measured=None) for one in VARIANTS], ["turbo"])
    assert run.against_measured("turbo") is None
    assert run.against_full("turbo") is None


def test_all_substitutions_are_the_default(turbo: TurboEsm) -> None:
    run = score_file(turbo, WILD_TYPE, None, ["full"], first_position=24, method="wild_type")
    assert len(run.variants) == 19 * 8
    assert run.variants[0] == MeasuredVariant("M24A")
    assert run.scores["full"].method == "wild_type"


def test_scores_that_are_not_finite(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = VariantScores((VariantScore("M1A", math.nan),), "M", "masked", "turbo", "turbo3", 0)
    monkeypatch.setattr(records, "score_variants", lambda *arguments, **options: broken)
    with pytest.raises(ValueError, match="scores of wt are not finite; try --dtype float32"):
        score_file(turbo, WILD_TYPE, VARIANTS[:1], ["turbo"])


def test_the_table_has_a_column_per_arm(turbo: TurboEsm, tmp_path: Path) -> None:
    run = score_file(turbo, WILD_TYPE, VARIANTS, ["turbo", "frozen"])
    run.write(tmp_path / "scores.csv")
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["mutant", "measured", "turbo", "frozen"]
    assert [row["mutant"] for row in rows] == [one.variant for one in VARIANTS]
    assert [row["measured"] for row in rows] == ["0.5", "-1.0", "", "2.0"]
    for arm in ("turbo", "frozen"):
        assert [float(row[arm]) for row in rows] == run.scores[arm].values


def test_a_protein_that_does_not_fit_is_refused_before_it_begins(
    turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**18)
    monkeypatch.setattr(records, "all_substitutions", lambda *arguments: pytest.fail("began"))
    with pytest.raises(NotEnoughMemoryError, match=r"^\d+ tokens at once need about"):
        score_file(turbo, ProteinRecord("a", "MKTAYIAKQRQISFVKSHFSRQ"), None, ["turbo"])
