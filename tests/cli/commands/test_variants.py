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
    assert "Spearman" in printed and "with measured" in printed and "wt: 3 variants, masked marginals" in printed
    names = ["M24A", "K25R", "T26S:K31G"]
    expected = turbo.score_variants(WILD_TYPE, names, first_position=24)
    [result] = json.loads(found.read_text())["results"]
    assert result["arms"]["turbo"]["variants"] == expected.to_dict()["variants"]
    assert abs(result["arms"]["turbo"]["spearman_with_measured"]) == pytest.approx(1)
    assert result["arms"]["full"]["spearman_with_full"] is None
    rows = list(csv.DictReader(out.open()))
    assert [row["mutant"] for row in rows] == names
    assert [row["fitness"] for row in rows] == ["0.5", "-1", ""]
    assert [float(row["turbo"]) for row in rows] == expected.values


def test_many_wild_types_in_one_run(esm_shared, turbo, write, tmp_path):
    proteins = write("wild_types.fasta", f">sp|P1|A_B x\n{WILD_TYPE}\n>two/11-13\nGSW\n>three\nMK1\n>four\nAC\n")
    table = write("variants.tsv", "uniprot\tmutant\tnote\nP1\tM1A\tx\ntwo/11-13\tS12A\ty\nGSW\tG1A\tz\n")
    out = tmp_path / "scores.csv"
    code, printed, err = esm_shared("variants", proteins, table, "--protein-column", "UniProt", "--out", out)
    assert code == 1
    assert [line.partition("record ")[2][:12] for line in err.splitlines()] == ["'three': pos", "'line 4': 'G"]
    assert "sp|P1|A_B: 1 variant," in printed and "two/11-13: 1 variant," in printed and "four" not in printed
    rows = list(csv.DictReader(out.open()))
    assert [(row["protein"], row["mutant"], row["position"], row["note"]) for row in rows] == [
        ("sp|P1|A_B", "M1A", "1", "x"), ("two/11-13", "S12A", "12", "y"),
    ]  # fmt: skip
    [expected] = turbo.score_variants("GSW", "S2A").values
    assert float(rows[1]["turbo"]) == pytest.approx(expected, abs=2e-3)


def test_more_than_a_few_proteins_are_summed_up_unless_asked(esm_shared, write):
    proteins = write("wild_types.fasta", "".join(f">p{i}\nMKTAY\n" for i in range(4)))
    _, printed, _ = esm_shared("variants", proteins, "--method", "wild_type")
    assert "4 proteins, wild-type marginals" in printed and "top" not in printed
    assert sum(line.startswith("│ p") for line in printed.splitlines()) == 4
    _, printed, _ = esm_shared("variants", proteins, "--method", "wild_type", "--top", 1)
    assert printed.count("top 1 by turbo") == 4
    # Nothing was measured, and there is nothing to compare with.
    assert "Spearman" not in printed and "│ - " not in printed


def test_bad_variants_are_reported_and_the_others_scored(esm_shared, wild_type, write):
    table = write("variants.csv", "mutant,score\nM1A,1\nK1A,2\nK2R,x\nT3S,inf\nA4G,3\n")
    code, printed, err = esm_shared("variants", wild_type, table, "--measured", "score")
    assert code == 1
    assert "wt: 2 variants" in printed
    assert err.splitlines() == [
        f"esm-turbo: error: {table}, record 'line 3': 'K1A': residue 1 is M; "
        "counted from 1, the protein has 2 of the 3 residues that the variants name: correct this one",
        f"esm-turbo: error: {table}, record 'line 4': score is 'x', not a number; correct it or leave it empty",
        f"esm-turbo: error: {table}, record 'line 5': score is 'inf', not finite; correct it or leave it empty",
    ]


def test_columns_that_have_names_of_other_columns_are_mentioned(esm_shared, wild_type, write, tmp_path):
    table, out = write("variants.csv", "mutant,protein,gene,position,full\nM1A,p53,wt,site 1,3\n"), tmp_path / "out.csv"
    _, _, err = esm_shared("variants", wild_type, table, "--protein-column", "gene", "--out", out)
    assert err.endswith(
        f"left out of {out}, whose own columns have these names: protein, position, full; rename them to keep them\n"
    )
    with out.open() as file:
        [row] = csv.DictReader(file)
    assert (row["protein"], row["mutant"], row["position"], row["gene"]) == (
        "wt",
        "M1A",
        "1",
        "wt",
    ) and "full" not in row


def test_deletions_are_scored_as_whole_variants(esm_shared, wild_type, write):
    table = write("variants.csv", "mutant\nK2del\n")
    code, printed, err = esm_shared("variants", wild_type, table, "--method", "pseudo_perplexity")
    assert (code, err) == (0, "") and "K2del" in printed
    assert esm_shared("variants", wild_type, table).code == 2


@pytest.mark.parametrize("rows", ["K25A", "K25A\nT26A\nA27G"])
def test_misnumbered_variants_point_to_the_option(esm_shared, wild_type, write, rows):
    table = write("variants.csv", f"mutant\n{rows}\n")
    code, printed, err = esm_shared("variants", wild_type, table)
    assert (code, printed) == (2, "")
    *bad, last = err.splitlines()
    assert last == f"esm-turbo: error: {table}: no usable variant; correct those above"
    cause = "--first-position sets it" if len(bad) == 1 else "With --first-position 24, all 3 residues fit"
    assert len(bad) == len(rows.split())
    assert all(line.endswith(f"is 1 the position of the first residue? {cause}") for line in bad)


@pytest.mark.parametrize(
    ("fasta", "table", "options", "message"),
    [
        (">a\nMK\n>b\nMT\n", "mutant\nM1A\n", [], "lacks the column 'protein', which names the wild type of each"),
        (">a\nMK1\n", "mutant\nM1A\n", [], "no usable record"),
        (">a\nMK\n", "protein,mutant\nb,M1A\nc,M1A\n", [], "no row names a usable protein, but 'b', 'c'"),
        (">a\nMK\n", "variant\nM1A\n", [], "'mutant'; its first line, which names the columns, is 'variant'"),
        (">a\nMK\n", "M1A\nK2A\n", [], "'mutant'; its first line, which names the columns, is 'M1A'"),
        (">a\nMK\n", "mutant\nM1A\n", ["--measured", "fitness"], "lacks the column 'fitness'"),
        (">a\nMK\n", "mutant,Turbo\nM1A,1\n", ["--measured", "turbo"], "'turbo' is a column of scores, too; rename"),
        (">a\nMK\n", "mutant\nK1A\n", [], "no usable variant"),
        (">a\nMK\n", "mutant\nM1A\n", ["--method", "both"], "--method"),
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


def test_the_shipped_measurements_match_their_wild_type_at_its_position():
    folder = evaluation_proteins().parent
    [record] = read_fasta_strict(folder / "blat_ecolx.fasta")
    good, bad = read_variants(folder / "blat_ecolx_ranganathan2015.csv", [record], first_position=24)
    assert (len(record.sequence), len(good), bad) == (263, 4996, [])
    assert good[0].variant == "H24C" and good[0].measured == -0.418259925
    with pytest.raises(CsvError, match=r"4,806 of 4,996 variants are not of BLAT_ECOLX, such as line 2: .*; is 1 the "):
        read_variants(folder / "blat_ecolx_ranganathan2015.csv", [record])


def test_unknown_letters_of_a_wild_type_are_replaced_on_request(esm, tmp_path, tiny_folder):
    path = tmp_path / "wild_type.fasta"
    path.write_text(">a\nMKJAYI\n")
    assert "--unknown X" in esm("variants", path).err
    result = esm("variants", path, "--unknown", "X", "--arm", "full", "--model", tiny_folder, "--json", "-")
    [found] = json.loads(result.out)["results"]
    # All single substitutions, 20 of X.
    assert (result.code, found["variants"]) == (0, 5 * 19 + 20)
    result = esm("variants", path, "--unknown", "X", "--measured", "fitness")
    assert result.code == 2
    assert "--measured fitness names a column; give the table of variants that has it" in result.error
