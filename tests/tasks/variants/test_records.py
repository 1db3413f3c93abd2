"""Variants of a file: reading them, arms and measurements side by side, and the table that is written."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr
from torch import Tensor

from esm_turbo import TurboEsm
from esm_turbo.files.csv_files import CsvError
from esm_turbo.files.journal import Journal
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.tasks.common import memory
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.scoring_task import Scored, score_item
from esm_turbo.tasks.variants import score
from esm_turbo.tasks.variants.many import VariantsTask, WildType
from esm_turbo.tasks.variants.records import MeasuredVariant, read_variants, score_records
from esm_turbo.tasks.variants.score import ProteinRows, VariantScore, VariantScores
from esm_turbo.tasks.variants.substitutions import all_substitutions
from tests.helpers.scores import assert_variants_close

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
    path.write_text("mutant,score,fitness\nM1A,1,0.5\nK2R,2,\nK1A,3,1\nT3S,x,7\nA4G,inf,8\nI6V,1_0,9\n")
    return path


def test_variants_of_a_file(table: Path) -> None:
    good, bad = read_variants(table, [WILD_TYPE])
    assert [(one.variant, one.measured) for one in good] == [
        ("M1A", 0.5),
        ("K2R", None),
        ("T3S", 7),
        ("A4G", 8),
        ("I6V", 9),
    ]
    assert {one.protein for one in good} == {"wt"}
    assert good[0].columns == {"score": "1", "fitness": "0.5"}
    assert [(one.record, one.reason) for one in bad] == [
        (
            "line 4",
            "'K1A': residue 1 is M; "
            "counted from 1, the protein has 5 of the 6 residues that the variants name: correct this one",
        )
    ]


def test_measurements_of_another_column(table: Path) -> None:
    good, bad = read_variants(table, [WILD_TYPE], measured="score")
    assert [(one.variant, one.measured) for one in good] == [("M1A", 1), ("K2R", 2)]
    assert [one.reason for one in bad[1:]] == [
        "score is 'x', not a number; correct it or leave it empty",
        "score is 'inf', not finite; correct it or leave it empty",
        "score is '1_0', not a number; correct it or leave it empty",
    ]


def test_a_file_without_measurements(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Mutant\nM24A\n")
    [one], bad = read_variants(tmp_path / "a.csv", [WILD_TYPE], first_position=24)
    assert (one.variant, one.measured, bad) == ("M24A", None, [])


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
        read_variants(tmp_path / "a.csv", [WILD_TYPE], measured=measured)


@pytest.mark.parametrize(("bad", "refused"), [(20, False), (21, True)])
def test_mostly_bad_variants_are_one_error(tmp_path: Path, bad: int, refused: bool) -> None:
    (tmp_path / "a.csv").write_text("mutant\n" + "K25A\n" * bad + "M1A\n" * 20)
    if not refused:
        assert len(read_variants(tmp_path / "a.csv", [WILD_TYPE])[1]) == bad
        return
    message = (
        "21 of 41 variants are not of wt, such as line 2: 'K25A': position 25 lies outside the protein, 1 to 8;"
        " is 1 the position of the first residue? `first_position` sets it"
    )
    with pytest.raises(CsvError) as caught:
        read_variants(tmp_path / "a.csv", [WILD_TYPE])
    assert str(caught.value).endswith(message)


OTHER = ProteinRecord("sp|P69905|HBA_HUMAN", "GSWKDLAE", "first_position=101")


@pytest.mark.parametrize("name", ["sp|P69905|HBA_HUMAN", "P69905", "HBA_HUMAN", "gswkdlae"])
def test_rows_name_their_wild_type(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"protein\tmutant\tDMS_score\nwt\tM1A\t1\n{name}\tG101A\t2\n\tG1A\t3\nwt\tG101A\t4\n")
    good, bad = read_variants(path, [WILD_TYPE, OTHER])
    assert [(one.protein, one.variant, one.measured) for one in good] == [
        ("wt", "M1A", 1),
        (OTHER.id, "G101A", 2),
    ]
    assert [(one.record, one.reason) for one in bad] == [
        ("line 4", "names no protein; fill the column 'protein'"),
        (
            "line 5",
            "'G101A': position 101 lies outside the protein, 1 to 8; "
            "counted from 1, the protein has 1 of the 2 residues that the variants name: correct this one",
        ),
    ]


def test_another_column_may_name_the_wild_types(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("UniProt,mutant\nP69905,G1A\n")
    [one], _ = read_variants(path, [WILD_TYPE, OTHER], protein_column="uniprot", first_position=1)
    assert one.protein == OTHER.id
    with pytest.raises(CsvError, match="lacks the column 'gene'"):
        read_variants(path, [WILD_TYPE], protein_column="gene")
    message = "lacks the column 'protein', which names the wild type of each variant; there are 2, such as 'wt'"
    with pytest.raises(CsvError, match=message):
        read_variants(path, [WILD_TYPE, OTHER])


def test_tables_of_clinvar(tmp_path: Path) -> None:
    path = tmp_path / "clinvar.tsv"
    names = ["NM_1.2(WT):c.1A>G (p.Met1Ala)", "NM_1.2(WT):c.4+1G>A", "NM_1.2(WT):c.4_6del (p.Lys2del)"]
    path.write_text("Name\tGermline classification\n" + "".join(f"{name}\tBenign\n" for name in names))
    good, bad = read_variants(path, [WILD_TYPE], mutant_column="Name")
    assert [one.variant for one in good] == names[:1] and good[0].columns["Germline classification"] == "Benign"
    assert [one.reason.partition("; ")[0] for one in bad] == [
        f"{names[1]!r} names no change of the protein, such as (p.Arg175His)",
        f"{names[2]!r}: K2del has no marginals, which are of substitutions, such as V10G:I11G",
    ]
    good, bad = read_variants(path, [WILD_TYPE], mutant_column="Name", indels=True)
    assert [one.variant for one in good] == [names[0], names[2]] and len(bad) == 1


@pytest.mark.parametrize("count", [4, 24])
def test_bad_variants_of_a_protein_have_one_cause(tmp_path: Path, count: int) -> None:
    (tmp_path / "a.csv").write_text("mutant\nX\n" + "K25A\nT26S\nK31R\nY28G\n" * (count // 4))
    cause = f"is 1 the position of the first residue? With `first_position` 24, all {count} residues fit"
    if count > 20:
        with pytest.raises(CsvError) as caught:
            read_variants(tmp_path / "a.csv", [WILD_TYPE])
        start = "25 of 25 variants are not of wt, such as line 3: 'K25A': position 25 lies outside the protein, 1 to 8"
        assert str(caught.value) == f"{tmp_path / 'a.csv'}: {start}; {cause}"
        return
    good, bad = read_variants(tmp_path / "a.csv", [WILD_TYPE])
    assert not good and bad[0].reason.startswith("'X' is not a variant")
    assert [one.reason.partition("; ")[2] for one in bad[1:]] == [cause] * 4


def test_one_wrong_wild_type_among_several_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("protein,mutant\nwt,M1A\n" + "P69905,G1A\n" * 21 + "P69905,G101A\n")
    good, bad = read_variants(path, [WILD_TYPE, OTHER])
    assert [one.protein for one in good] == ["wt"]
    [(record, reason)] = [(one.record, one.reason) for one in bad]
    assert record == OTHER.id
    assert reason.startswith(f"21 of 22 variants are not of {OTHER.id}, such as line 3:")
    assert reason.endswith("; is 101 the position of the first residue? With `first_position` 1, 21 of 22 residues fit")


def test_every_protein_in_every_arm_and_its_correlations(turbo: TurboEsm) -> None:
    calls: list[tuple[str, int, int]] = []
    variants = [*(replace(one, protein="wt") for one in VARIANTS), MeasuredVariant("G101A", protein=OTHER.id)]
    run = score_records(
        turbo, [WILD_TYPE, OTHER], variants, ["turbo", "full"], progress=lambda *call: calls.append(call)
    )
    first, second = run.results
    names = [one.variant for one in VARIANTS]
    assert_variants_close(first.scores["turbo"], turbo.score_variants(WILD_TYPE.sequence, names))
    assert first.scores["full"] == turbo.score_variants(WILD_TYPE.sequence, names, arm="full")
    assert_variants_close(second.scores["turbo"], turbo.score_variants(OTHER.sequence, ["G101A"], first_position=101))
    # Five positions of the first protein and one of the second, in two arms.
    assert calls[-1] == ("score", 12, 12)
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    turbo_scores, full_scores = (first.scores[arm].values for arm in ("turbo", "full"))
    measured = spearmanr([turbo_scores[i] for i in (0, 1, 3)], [0.5, -1.0, 2.0]).statistic
    assert first.against_measured("turbo") == pytest.approx(measured)
    assert first.against_full("turbo") == pytest.approx(spearmanr(turbo_scores, full_scores).statistic)
    assert first.against_full("full") is None
    assert second.against_measured("turbo") is None
    facts = first.to_dict()
    assert (facts["protein"], facts["variants"], set(facts["arms"])) == ("wt", 4, {"turbo", "full"})
    assert facts["arms"]["turbo"]["spearman_with_measured"] == first.against_measured("turbo")


def test_parts_of_a_protein_are_joined(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [*VARIANTS, MeasuredVariant("p.Lys2del")]
    options: dict[str, Any] = {"method": "pseudo_perplexity", "toks_per_batch": 100}
    sizes = []
    run_parts = VariantsTask.parts

    def parts(task: VariantsTask, item: WildType, limit: int) -> list[Any]:
        found = list(run_parts(task, item, task.tokens(item) * 2 // len(item.variants or "?")))
        sizes.extend(len(one.variants or ()) for one, _ in found)
        return found

    monkeypatch.setattr(VariantsTask, "parts", parts)
    [result] = score_records(turbo, [WILD_TYPE], variants, ["turbo"], **options).results
    assert sizes == [2, 2, 1]
    expected = turbo.score_variants(WILD_TYPE.sequence, [one.variant for one in variants], method="pseudo_perplexity")
    assert_variants_close(result.scores["turbo"], expected)
    [every] = score_records(turbo, [ProteinRecord("a", "MKT")], None, ["turbo"], **options).results
    assert [one.variant for one in every.variants] == all_substitutions("MKT")


@pytest.mark.parametrize(
    ("arm", "names", "limit", "numbers"),
    [
        # A context of 8 tokens, which is not read, and 8 rows of 8.
        ("full", None, 24, [range(50), range(50, 100), range(100, 150), range(150, 152)]),
        # 8 rows of 9, and of each context at least four times its tokens.
        ("turbo", None, 1, [range(60), range(60, 120), range(120, 152)]),
        ("full", ["K2A", "M1A", "K2C", "M1C"], 12, [[0, 2], [1, 3]]),
        ("full", ["M1A:K2A", "K2C", "M1C"], 1, [None]),
    ],
)
def test_parts_mask_positions_of_their_own(
    turbo: TurboEsm, arm: Any, names: list[str] | None, limit: int, numbers: Sequence[Sequence[int] | None]
) -> None:
    task, item = VariantsTask((arm,)), WildType(WILD_TYPE.sequence, variants=names)
    parts = list(task.parts(item, limit))
    assert [own and list(own) for _, own in parts] == [own and list(own) for own in numbers]
    scored = [Scored[VariantScores]({arm: score_item(turbo, task, part)}, numbers=own) for part, own in parts]
    assert_variants_close(Scored.joined(scored).scores[arm], turbo.score_variants(*item[:1], names, arm=arm))


def test_proteins_without_variants_are_left_out(turbo: TurboEsm) -> None:
    run = score_records(turbo, iter([WILD_TYPE, OTHER]), iter([MeasuredVariant("M1A", protein="wt")]), ["turbo"])  # type: ignore[arg-type]
    assert [one.wild_type.id for one in run.results] == ["wt"] and run.failed == []


def test_changes_of_another_gene_are_not_of_this_protein(tmp_path: Path) -> None:
    """Where the residue agrees by chance, nothing else would tell."""
    names = {
        "NM_000546.6(TP53):c.1A>G (p.Met1Val)": True,
        "NM_001126112.3(TP53):c.5A>G (p.Lys2Arg)": True,
        "NM_007294.4(BRCA1):c.1A>C (p.Met1Leu)": False,
        "NP_000537.3:p.Lys2Arg": True,
        "NP_000537.4:p.(Thr3Ala)": True,
        "NP_009225.1:p.Thr3Ser": False,
        "p.Met1Ile": True,
    }
    path = tmp_path / "clinvar.csv"
    path.write_text("\n".join(["mutant", *names]))
    good, bad = read_variants(path, [WILD_TYPE])
    assert [one.variant for one in good] == [name for name, is_own in names.items() if is_own]
    assert [one.reason.split("'")[2].split(";")[0] for one in bad] == [
        " is of BRCA1, and most variants are of TP53",
        " is of NP_009225, and most variants are of NP_000537",
    ]


def test_a_measurement_that_is_missing_in_pandas_is_none() -> None:
    assert MeasuredVariant("M1A", float("nan")) == MeasuredVariant("M1A", None)


def test_an_identifier_names_one_protein(turbo: TurboEsm) -> None:
    with pytest.raises(ValueError, match="identifier 'wt' names two sequences"):
        score_records(turbo, [WILD_TYPE, ProteinRecord("wt", "MKT")], None, ["turbo"])


def test_all_substitutions_are_the_default(turbo: TurboEsm) -> None:
    run = score_records(turbo, [WILD_TYPE, OTHER], None, ["full"], method="wild_type")
    first, second = run.results
    assert [len(one.variants) for one in run.results] == [19 * 8, 19 * 8]
    assert (first.variants[0], second.variants[0]) == (MeasuredVariant("M1A"), MeasuredVariant("G101A"))
    assert first.scores["full"].method == "wild_type"
    [moved] = score_records(turbo, [OTHER], None, ["full"], method="wild_type", first_position=7).results
    assert moved.variants[0] == MeasuredVariant("G7A")


def test_scores_that_are_not_finite(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ProteinRows.result

    def broken(self: ProteinRows, predicted: Sequence[Tensor]) -> VariantScores:
        """NaN for the first protein."""
        found = original(self, predicted)
        wrong = math.nan if self.wild_type == WILD_TYPE.sequence else 0.0
        return replace(found, scores=tuple(VariantScore(one.variant, one.score + wrong) for one in found.scores))

    monkeypatch.setattr(ProteinRows, "result", broken)
    variants = [*VARIANTS[:1], MeasuredVariant("G101A", protein=OTHER.id)]
    run = score_records(turbo, [WILD_TYPE, OTHER], [replace(variants[0], protein="wt"), variants[1]], ["turbo"])
    assert [one.wild_type for one in run.results] == [OTHER]
    assert run.failed == [BadRecord("wt", "its scores are not finite; try --dtype float32")]


def test_the_table_has_a_column_per_arm_and_those_of_the_input(turbo: TurboEsm, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("mutant,Assay,fitness,turbo\nm1a,x,=1,9\nT3S:K8G,y,,8\n".replace("=1", "1"))
    variants, _ = read_variants(tmp_path / "a.csv", [WILD_TYPE])
    run = score_records(turbo, [WILD_TYPE], variants, ["turbo", "frozen"])
    for out in (tmp_path / "scores.csv", tmp_path / "again.csv"):
        run.write(out)
        with out.open() as file:
            rows = list(csv.DictReader(file))
        own = ["protein", "mutant", "position", "wild_type_residue", "mutant_residue", "turbo", "frozen", "run_method"]
        assert list(rows[0]) == [*own, "Assay", "fitness"]
        assert [list(row.values())[:5] for row in rows] == [
            ["wt", "m1a", "1", "M", "A"],
            ["wt", "T3S:K8G", "3;8", "T:K", "S:G"],
        ]
        assert [(row["Assay"], row["fitness"]) for row in rows] == [("x", "1"), ("y", "")]
        for arm in ("turbo", "frozen"):
            assert [float(row[arm]) for row in rows] == run.results[0].scores[arm].values
        # What was written can be read and scored again.
        again, _ = read_variants(out, [WILD_TYPE])
        run = score_records(turbo, [WILD_TYPE], again, ["turbo", "frozen"])


@pytest.mark.parametrize("arm", ["turbo", "full"])
def test_a_protein_that_does_not_fit_is_refused_before_its_variants_are_named(
    turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch, arm: Arm
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**18)
    monkeypatch.setattr(score, "all_substitutions", lambda *arguments: pytest.fail("began"))
    run = score_records(turbo, [ProteinRecord("a", "MKTAYIAKQRQISFVKSHFSRQ")], None, [arm])
    [failed] = run.failed
    assert run.results == [] and "24 tokens at once need about" in failed.reason


def test_results_that_are_kept_are_of_the_same_variants(turbo: TurboEsm, tmp_path: Path) -> None:
    calls: list[tuple[ProteinRecord, list[MeasuredVariant] | None, dict[str, Any]]] = [
        (OTHER, None, {}),
        (OTHER, None, {"first_position": 7}),
        (OTHER, None, {"method": "wild_type"}),
        (WILD_TYPE, VARIANTS, {}),
        (WILD_TYPE, VARIANTS[:1], {}),
    ]

    def run(number: int) -> int:
        protein, variants, options = calls[number]
        score_records(turbo, [protein], variants, ["turbo"], journal=(journal := Journal(tmp_path)), **options)
        return journal.found

    for number in range(len(calls)):
        assert [run(number), run(number)] == [0, 1]
        for other in set(range(len(calls))) - {number}:
            with pytest.raises(ValueError, match="holds results of a run that was stopped"):
                run(other)
        Journal(tmp_path).remove()


def test_a_variant_in_place_of_a_file_is_told_where_to_go():
    with pytest.raises(CsvError, match=r"^R30A:K31E: .*no such file; .*; variants belong in the column 'mutant'"):
        read_variants("R30A:K31E", [ProteinRecord("p", "MKT")])
