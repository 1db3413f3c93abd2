"""`esm-turbo variants`: scores, correlations, bad variants, and wrong options."""

from __future__ import annotations

import csv
import json

import pytest

from esm_turbo.assets import evaluation_proteins
from esm_turbo.files.csv_files import CsvError
from esm_turbo.proteins.fasta import read_fasta_strict
from esm_turbo.tasks.variants.records import read_variants

WILD_TYPE = "MKTAYIAK"


@pytest.fixture
def wild_type(write):
    return write("wild_type.fasta", f">wt\n{WILD_TYPE}\n")


def test_variants_of_a_file_equal_those_in_python(esm_shared, turbo, wild_type, write, tmp_path):
    table = write("variants.csv", "mutant,fitness\nM24A,0.5\nK25R,-1\nT26S:K31G,\n")
    out, found = tmp_path / "scores.csv", tmp_path / "scores.json"
    code, printed, err = esm_shared(
        "variants", wild_type, table, "--first-position", 24, "--arm", "turbo", "full", "--out", out, "--json", found
    )
    assert (code, err) == (0, "")
    assert "Spearman with measured" in printed and "3 variants, masked marginals" in printed
    names = ["M24A", "K25R", "T26S:K31G"]
    expected = turbo.score_variants(WILD_TYPE, names, first_position=24)
    result = json.loads(found.read_text())
    assert result["arms"]["turbo"]["variants"] == expected.to_dict()["variants"]
    assert abs(result["arms"]["turbo"]["spearman_with_measured"]) == pytest.approx(1)
    assert result["arms"]["full"]["spearman_with_full"] == pytest.approx(1)
    rows = list(csv.DictReader(out.open()))
    assert [row["mutant"] for row in rows] == names
    assert [row["measured"] for row in rows] == ["0.5", "-1.0", ""]
    assert [float(row["turbo"]) for row in rows] == expected.values


def test_all_substitutions_are_scored_by_default(esm_shared, wild_type, tmp_path):
    out = tmp_path / "scores.csv"
    code, printed, _ = esm_shared("variants", wild_type, "--method", "wild_type", "--arm", "full", "--out", out)
    assert code == 0
    assert "wild-type marginals" in printed
    assert len(list(csv.DictReader(out.open()))) == 19 * len(WILD_TYPE)


def test_bad_variants_are_reported_and_the_others_scored(esm_shared, wild_type, write):
    table = write("variants.csv", "mutant,score\nM1A,1\nK1A,2\nK2R,x\nT3S,inf\nA4G,3\n")
    code, printed, err = esm_shared("variants", wild_type, table, "--measured", "score")
    assert code == 1
    assert "2 variants" in printed
    assert err.splitlines() == [
        f"esm-turbo: error: {table}, record 'line 3': 'K1A': residue 1 is M; is 1 the position of the first residue?",
        f"esm-turbo: error: {table}, record 'line 4': score is 'x', not a number; correct it or leave it empty",
        f"esm-turbo: error: {table}, record 'line 5': score is 'inf', not finite; correct it or leave it empty",
    ]


@pytest.mark.parametrize(
    ("fasta", "table", "options", "message"),
    [
        (">a\nMK\n>b\nMT\n", "mutant\nM1A\n", [], "holds 2 proteins; give a file with the wild type alone"),
        (">a\nMK1\n", "mutant\nM1A\n", [], "position 3 is '1'"),
        (">a\nMK\n", "variant\nM1A\n", [], "lacks the column 'mutant'; there are 'variant'"),
        (">a\nMK\n", "mutant\nM1A\n", ["--measured", "fitness"], "lacks the column 'fitness'"),
        (">a\nMK\n", "mutant\nK1A\n", [], "no usable variant"),
        (">a\nMK\n", "mutant,fitness\n", [], "holds no variants; give at least one below the column names"),
        (">a\nMK\n", "mutant\nM1A\n", ["--method", "both"], "--method"),
        (">a\nMK\n", "mutant\nM1A\n", ["--refresh", "-1"], "--refresh must be at least 0, got -1"),
    ],
)
def test_unusable_variants_are_refused(esm_shared, write, tmp_path, fasta, table, options, message):
    out = tmp_path / "scores.csv"
    code, printed, err = esm_shared(
        "variants", write("wt.fasta", fasta), write("variants.csv", table), "--out", out, *options
    )
    assert (code, printed) == (2, "")
    assert message in err.splitlines()[-1]
    assert not out.exists()


def test_the_shipped_measurements_match_their_wild_type():

    folder = evaluation_proteins().parent
    [record] = read_fasta_strict(folder / "blat_ecolx.fasta")
    good, bad = read_variants(folder / "blat_ecolx_ranganathan2015.csv", record, first_position=24)
    assert (len(record.sequence), len(good), bad) == (263, 4996, [])
    assert good[0].variant == "H24C" and good[0].measured == -0.418259925


def test_a_wrong_first_position_is_one_error():

    folder = evaluation_proteins().parent
    [record] = read_fasta_strict(folder / "blat_ecolx.fasta")
    with pytest.raises(CsvError, match=r"4,806 of 4,996 variants are not of BLAT_ECOLX; is 1 the .* line 2: "):
        read_variants(folder / "blat_ecolx_ranganathan2015.csv", record)


def test_a_measured_column_needs_a_file(esm, fasta):
    result = esm("variants", fasta, "--measured", "fitness")
    assert result.code == 2
    assert "--measured fitness names a column; give the CSV file of variants that has it" in result.error


def test_unknown_letters_of_a_wild_type_are_replaced_on_request(esm, tmp_path, tiny_folder):
    path = tmp_path / "wild_type.fasta"
    path.write_text(">a\nMK1AYI\n")
    assert "--unknown X" in esm("variants", path).err
    result = esm("variants", path, "--unknown", "X", "--arm", "full", "--model", tiny_folder, "--json", "-")
    assert result.code == 0 and json.loads(result.out)
