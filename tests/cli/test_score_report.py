"""The commands `score` and `variants`: what they print and write, and the right exit code for what goes wrong."""

from __future__ import annotations

import csv
import json

import pytest
import transformers.utils.logging as transformers_logging

from esm_turbo import TurboEsm
from esm_turbo.assets import evaluation_proteins
from esm_turbo.cli import app as cli
from esm_turbo.tasks.common import memory
from esm_turbo.tasks.common.memory import NotEnoughMemoryError, check_memory

TARGET = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
OTHER = "GSWKDLAEPLLKRRVWTC"
WILD_TYPE = "MKTAYIAK"


@pytest.fixture(autouse=True)
def loud_transformers():
    """The commands silence transformers for their process; other tests look at its warnings."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    yield
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()


@pytest.fixture
def esm(capsys, turbo, monkeypatch):
    """Runs a command in this process, on the model that all tests share."""
    monkeypatch.setattr(TurboEsm, "from_pretrained", lambda *args, **options: turbo)

    def run(*arguments):
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def write(tmp_path):
    def to(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return to


@pytest.fixture
def targets(write):
    return write("targets.fasta", f">one\n{TARGET}\n>two\n{OTHER}\n")


@pytest.fixture
def candidates(write):
    return write("candidates.fasta", ">a\nACDEF\n>b\nWTC\n>c\nGGGSG\n")


# --- score


def test_scores_of_a_file_are_those_of_python(esm, turbo, targets, candidates, tmp_path):
    out, found = tmp_path / "scores.csv", tmp_path / "scores.json"
    code, printed, err = esm("score", targets, candidates, "--out", out, "--json", found)
    assert (code, err) == (0, "")
    assert "one, 33 residues" in printed and "pseudo-perplexity, turbo" in printed
    expected = turbo.score(TARGET, ["ACDEF", "WTC", "GGGSG"])
    [first, second] = json.loads(found.read_text())["results"]
    assert (first["target"], second["residues"]) == ("one", len(OTHER))
    assert first["arms"]["turbo"] == expected.to_dict()
    assert [one["id"] for one in first["candidates"]] == ["a", "b", "c"]
    rows = list(csv.DictReader(out.open()))
    assert [row["target"] for row in rows] == ["one"] * 3 + ["two"] * 3
    assert [row["candidate"] for row in rows[:3]] == ["abc"[i] for i in expected.ranking()]
    assert [int(row["rank"]) for row in rows[:3]] == [1, 2, 3]
    best = expected.scores[expected.ranking()[0]]
    assert float(rows[0]["pseudo_perplexity"]) == best.pseudo_perplexity
    assert float(rows[0]["pseudo_log_likelihood"]) == best.pseudo_log_likelihood


def test_arms_are_compared_with_full(esm, targets, candidates, tmp_path):
    found = tmp_path / "scores.json"
    code, printed, _ = esm(
        "score", targets, candidates, "--arm", "turbo", "frozen", "full", "--top-k", 2, "--json", found
    )
    assert code == 0
    assert "agreement with full" in printed and "mean" in printed and "top 2 shared" in printed
    [first, _] = json.loads(found.read_text())["results"]
    assert set(first["agreement"]) == {"turbo", "frozen"}
    assert first["agreement"]["frozen"]["count"] == 3
    assert 0 < first["agreement"]["frozen"]["mean_difference"] < 0.2


def test_csv_candidates_may_be_for_one_target(esm, targets, write, tmp_path):
    table = write("candidates.csv", "id,Sequence,target,note\na,ACDEF,one,x\n,wtc,two,\nb,GGGSG,,\n")
    found = tmp_path / "scores.json"
    code, _, err = esm("score", targets, table, "--json", found)
    assert (code, err) == (0, "")
    first, second = json.loads(found.read_text())["results"]
    assert [one["id"] for one in first["candidates"]] == ["a", "b"]
    assert second["candidates"] == [{"id": "#2", "sequence": "WTC"}, {"id": "b", "sequence": "GGGSG"}]


def test_bad_records_are_listed_and_the_rest_is_done(esm, turbo, write, tmp_path):
    targets = write("targets.fasta", f">one\n{TARGET}\n>bad\nMK1T\n")
    table = write("candidates.csv", "id,sequence,target\na,ACDEF,\nb,,\nc,AC-D,\nd,WTC,three\n")
    found = tmp_path / "scores.json"
    code, _, err = esm("score", targets, table, "--json", found)
    assert code == 1
    lines = err.splitlines()
    assert lines == [
        f"esm-turbo: error: {targets}, record 'bad': position 3 is '1', not one of the 25 residue codes (A to Z without"
        " J); correct it, or replace it with X (--unknown X, in Python unknown='X')",
        f"esm-turbo: error: {table}, record 'b (line 3)': holds no residues; give a sequence or remove the record",
        f"esm-turbo: error: {table}, record 'c (line 4)': position 3 is '-', not one of the 25 residue codes (A to Z"
        " without J); correct it, or replace it with X (--unknown X, in Python unknown='X')",
        f"esm-turbo: error: {table}, record 'd (line 5)': there is no usable target 'three'; correct it, or leave it"
        " empty",
    ]
    result = json.loads(found.read_text())
    assert [one["record"] for one in result["failed"]] == ["bad", "b (line 3)", "c (line 4)", "d (line 5)"]
    [only] = result["results"]
    assert only["arms"]["turbo"] == turbo.score(TARGET, "ACDEF").to_dict()


def test_a_target_that_does_not_fit_is_listed_and_the_rest_is_done(esm, targets, candidates, monkeypatch, tmp_path):
    def check(model, tokens, *, stored):
        if tokens > len(TARGET):
            raise NotEnoughMemoryError(f"{tokens} tokens at once need about 9.0 GiB of memory")
        check_memory(model, tokens, stored=stored)

    monkeypatch.setattr("esm_turbo.tasks.common.arms.check_memory", check)
    code, printed, err = esm("score", targets, candidates)
    assert code == 1
    # <cls>, 33 residues, three masks and <eos>.
    assert err == f"esm-turbo: error: {targets}, record 'one': 38 tokens at once need about 9.0 GiB of memory\n"
    assert "two, 18 residues" in printed and "one, 33 residues" not in printed


def test_memory_is_that_of_the_device(esm, targets, candidates, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10)
    code, printed, err = esm("score", targets, candidates)
    assert (code, printed) == (1, "")
    assert [line.split(": ")[2].rpartition("record ")[2] for line in err.splitlines()] == ["'one'", "'two'"]
    assert err.count("0 MiB are free on cpu") == 2


@pytest.mark.parametrize(
    ("which", "text", "message"),
    [
        ("targets", "", "is empty"),
        ("targets", ">a\nM1\n", "no usable record"),
        ("candidates", "", "is empty"),
        ("candidates", ">a\n\n>b\nA-\n", "no usable record"),
        ("csv", "id,peptide\na,ACD\n", "lacks the column 'sequence'; there are 'id', 'peptide'"),
        ("csv", "sequence\n", "holds no candidates; give at least one below the column names"),
        ("csv", "", "is empty; its first line must name the columns"),
    ],
)
def test_files_that_cannot_be_used_at_all(esm, targets, candidates, write, tmp_path, which, text, message):
    path = write("bad.csv" if which == "csv" else "bad.fasta", text)
    first, second = (path, candidates) if which == "targets" else (targets, path)
    out = tmp_path / "scores.csv"
    code, printed, err = esm("score", first, second, "--out", out)
    assert (code, printed) == (2, "")
    assert err.splitlines()[-1].startswith(f"esm-turbo: error: {path}")
    assert message in err.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arm", "fast"], "--arm"),
        (["--arm"], "--arm must name at least one arm"),
        (["--place", "alone"], "--place"),
        (["--refresh", "-1"], "--refresh must be at least 0, got -1"),
        (["--top", "-1"], "--top must be at least 0, got -1"),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--toks-per-batch", "0"], "--toks-per-batch must be at least 1, got 0"),
        (["--out", "."], "is a folder; name a file"),
    ],
)
def test_wrong_options(esm, targets, candidates, options, message):
    code, printed, err = esm("score", targets, candidates, *options)
    assert (code, printed) == (2, "")
    assert len(err.splitlines()) == 1 and message in err


def test_json_on_standard_output(esm, targets, candidates):
    code, printed, _ = esm("score", targets, candidates, "--json", "-", "--place", "empty", "--refresh", 0)
    first = json.loads(printed)["results"][0]["arms"]["turbo"]
    assert (code, first["place"], first["refresh"]) == (0, "empty", 0)


# --- variants


@pytest.fixture
def wild_type(write):
    return write("wild_type.fasta", f">wt\n{WILD_TYPE}\n")


def test_variants_of_a_file_are_those_of_python(esm, turbo, wild_type, write, tmp_path):
    table = write("variants.csv", "mutant,fitness\nM24A,0.5\nK25R,-1\nT26S:K31G,\n")
    out, found = tmp_path / "scores.csv", tmp_path / "scores.json"
    code, printed, err = esm(
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


def test_without_a_file_all_substitutions_are_scored(esm, wild_type, tmp_path):
    out = tmp_path / "scores.csv"
    code, printed, _ = esm("variants", wild_type, "--method", "wild_type", "--arm", "full", "--out", out)
    assert code == 0
    assert "wild-type marginals" in printed
    assert len(list(csv.DictReader(out.open()))) == 19 * len(WILD_TYPE)


def test_bad_variants_are_listed_and_the_rest_is_done(esm, wild_type, write):
    table = write("variants.csv", "mutant,score\nM1A,1\nK1A,2\nK2R,x\nT3S,inf\nA4G,3\n")
    code, printed, err = esm("variants", wild_type, table, "--measured", "score")
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
def test_unusable_variants(esm, write, tmp_path, fasta, table, options, message):
    out = tmp_path / "scores.csv"
    code, printed, err = esm("variants", write("wt.fasta", fasta), write("variants.csv", table), "--out", out, *options)
    assert (code, printed) == (2, "")
    assert message in err.splitlines()[-1]
    assert not out.exists()


# --- the shipped data


def test_the_shipped_measurements_fit_their_wild_type():
    from esm_turbo.proteins.fasta import read_fasta_strict
    from esm_turbo.tasks.variants.records import read_variants

    folder = evaluation_proteins().parent
    [record] = read_fasta_strict(folder / "blat_ecolx.fasta")
    good, bad = read_variants(folder / "blat_ecolx_ranganathan2015.csv", record, first_position=24)
    assert (len(record.sequence), len(good), bad) == (263, 4996, [])
    assert good[0].variant == "H24C" and good[0].measured == -0.418259925


def test_a_wrong_first_position_is_one_error():
    from esm_turbo.files.csv_files import CsvError
    from esm_turbo.proteins.fasta import read_fasta_strict
    from esm_turbo.tasks.variants.records import read_variants

    folder = evaluation_proteins().parent
    [record] = read_fasta_strict(folder / "blat_ecolx.fasta")
    with pytest.raises(CsvError, match=r"4,806 of 4,996 variants are not of BLAT_ECOLX; is 1 the .* line 2: "):
        read_variants(folder / "blat_ecolx_ranganathan2015.csv", record)


def test_the_shipped_targets_and_peptides_can_be_read():
    from esm_turbo.files.csv_files import read_csv
    from esm_turbo.proteins.fasta import normalize_sequence, read_fasta_strict
    from esm_turbo.tasks.scoring.records import read_candidates

    folder = evaluation_proteins().parent
    targets = read_fasta_strict(folder / "peptide_target_6pv9.fasta")
    good, bad = read_candidates(folder / "peptide_targets_dev.csv", targets)
    assert (len(good), bad) == (92, [])
    receptors = [
        row["Receptor Sequence"] for row in read_csv(folder / "peptide_targets_dev.csv", ["Receptor Sequence"])
    ]
    assert [normalize_sequence(one, name="receptor") for one in receptors] == receptors
    assert targets[0].sequence in receptors
