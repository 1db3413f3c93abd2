"""`esm-turbo binders`: ranked peptides per target, bad records, and wrong options."""

from __future__ import annotations

import csv
import json

TARGET = "MKTAYIAKQRQISFVK"


def test_peptides_of_every_target_equal_those_in_python(esm_shared, turbo, write, tmp_path):
    targets = write("targets.fasta", f">one\n{TARGET}\n>bad\nMK1\n>two\nGSWKDLAE\n")
    out, found = tmp_path / "binders.tsv", tmp_path / "found.json"
    options = ["--length", 4, "--num-return-sequences", 6, "--seed", 2, "--top", 2, "--out", out, "--json", found]
    result = esm_shared("binders", targets, *options)
    assert result.code == 1 and "record 'bad': position 3 is '1'" in result.error
    expected = turbo.generate_binders(TARGET, 4, num_return_sequences=6, seed=2)
    rows = list(csv.DictReader(out.open(), delimiter="\t"))
    own = [row for row in rows if row["target"] == "one"]
    assert [row["binder"] for row in own] == [one.sequence for one in expected.binders]
    assert [float(row["pseudo_perplexity"]) for row in own] == [one.score.pseudo_perplexity for one in expected.binders]
    assert {row["target"] for row in rows} == {"one", "two"}
    first = json.loads(found.read_text())["results"][0]
    assert first == {"target": "one", **expected.to_dict()}
    assert expected.binders[0].sequence in result.out and "two" in result.out
    assert f"and {len(expected.binders) - 2} more" in result.out


def test_specificity_against_the_other_targets(esm_shared, turbo, write, tmp_path):
    targets, out = write("targets.fasta", f">one\n{TARGET}\n>two\nGSWKDLAE\n"), tmp_path / "binders.csv"
    options = ["--template", "GX[KR]P", "--background", "targets", "--sort-by", "specificity", "--out", out]
    found = tmp_path / "found.json"
    assert esm_shared("binders", targets, *options, "--num-return-sequences", 6, "--json", found).code == 0
    assert json.loads(found.read_text())["run"]["background"] == "targets"
    expected = turbo.generate_binders(
        TARGET, template="GX[KR]P", num_return_sequences=6, background=["GSWKDLAE"], sort_by="specificity"
    )
    own = [row for row in csv.DictReader(out.open()) if row["target"] == "one"]
    assert [row["binder"] for row in own] == [one.sequence for one in expected.binders]
    assert [float(row["specificity"]) for row in own] == [one.score.specificity for one in expected.binders]
    assert {row["run_background"] for row in own} == {"1 other target"}
    fasta = out.with_suffix(".fasta")
    assert esm_shared("binders", targets, *options[:-1], fasta, "--num-return-sequences", 6).code == 0
    first = expected.binders[0]
    assert fasta.read_text().startswith(f">one_1 specificity={first.score.specificity}\n{first.sequence}\n>one_2 ")


def test_targets_of_equal_residues_are_no_background(esm_shared, write):
    targets = write("targets.fasta", f">one\n{TARGET}\n>two\n{TARGET}\n")
    result = esm_shared("binders", targets, "--length", 4, "--background", "targets")
    assert result.code == 2 and "targets.fasta has one sequence; give decoys" in result.err


def test_the_printed_table_says_what_ranks_within_a_terminal(esm_shared, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    targets = write("targets.fasta", f">one\n{TARGET}\n")
    options = ["--template", "GX[KR]XXP", "--num-return-sequences", 9, "--top", 2, "--background"]
    by_spreads = esm_shared("binders", targets, *options, "decoys", "--sort-by", "specificity").out
    header = next(line for line in by_spreads.splitlines() if line.startswith("┃ rank"))
    assert [cell.strip() for cell in header.split("┃")[1:5]] == ["rank", "binder", "perplexity", "s.d."]
    assert "more; ranked by specificity, in standard deviations of 12 decoys\n" in by_spreads
    assert "more; ranked by specificity, nats per residue against no target\n" in (
        esm_shared("binders", targets, *options, "alone", "--sort-by", "specificity").out
    )
    assert (
        "more; ranked by pseudo-perplexity; specificity against no target\n"
        in esm_shared("binders", targets, *options, "alone").out
    )
    plain = esm_shared("binders", targets, "--length", 25, "--num-return-sequences", 2)
    assert "┃ perplexity ┃" in plain.out and "ranked" not in plain.out


def test_the_best_are_scored_again_and_drawn(esm_shared, turbo, write, tmp_path):
    targets, out, plot = write("targets.fasta", f">one\n{TARGET}\n"), tmp_path / "binders.csv", tmp_path / "binders.svg"
    options = ["--length", 5, "--num-return-sequences", 9, "--rescore", 3, "--top", 4]
    result = esm_shared("binders", targets, *options, "--out", out, "--plot", plot)
    expected = turbo.generate_binders(TARGET, 5, num_return_sequences=9, rescore=3)
    rows = list(csv.DictReader(out.open()))
    own = [tuple(row[name] for name in ("full_pseudo_perplexity", "full_rank")) for row in rows]
    assert own == [
        ("", "") if exact[0] is None else tuple(map(str, exact)) for exact in expected.scores.rescored_cells()
    ]
    printed = [line for line in result.out.splitlines() if expected.binders[0].sequence in line]
    assert f"{float(own[0][0]):.3f}" in printed[0] and "approximate, except those by full\n" in result.out
    drawn = plot.read_text()
    assert f"picture written to {plot}" in result.err
    assert all(f">{text}<" in drawn for text in ("share of designs", "best 9, turbo", "entropy"))
    plain = esm_shared("binders", targets, *options[:4]).out
    assert "by full" not in plain and "--rescore, or --arm full, computes them exactly" in plain


def test_a_picture_has_a_sheet_for_each_target(esm_shared, write, tmp_path):
    targets = write("targets.fasta", f">one\n{TARGET}\n>two\nGSWKDLAE\n")
    options = ["--template", "GX[KR]P", "--num-return-sequences", 3]
    result = esm_shared("binders", targets, *options, "--plot", tmp_path / "binders.png")
    assert result.code == 2 and ".png" in result.error
    assert esm_shared("binders", targets, *options, "--plot", tmp_path / "binders.html").code == 0
    page = (tmp_path / "binders.html").read_text()
    assert "one: " in page and "two: " in page and "target of 8 residues" in page
