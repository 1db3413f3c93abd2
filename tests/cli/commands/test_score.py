"""`esm-turbo score`: scores, rankings, bad records, and wrong options."""

from __future__ import annotations

import copy
import csv
import json

import pytest

from esm_turbo import TurboEsm
from esm_turbo.assets import evaluation_proteins
from esm_turbo.files.csv_files import read_csv, write_csv
from esm_turbo.files.journal import Journal
from esm_turbo.proteins.fasta import normalize_sequence, read_fasta_strict
from esm_turbo.tasks.common import memory
from esm_turbo.tasks.scoring import screens
from esm_turbo.tasks.scoring.records import read_candidates
from esm_turbo.tasks.scoring.score import Scores
from tests.helpers.scores import assert_close

TARGET = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
OTHER = "GSWKDLAEPLLKRRVWTC"


@pytest.fixture
def targets(write):
    return write("targets.fasta", f">one\n{TARGET}\n>two\n{OTHER}\n")


@pytest.fixture
def candidates(write):
    return write("candidates.fasta", ">a\nACDEF\n>b\nWTC\n>c\nGGGSG\n")


def test_scores_of_a_file_equal_those_in_python(esm_shared, turbo, targets, candidates, tmp_path):
    out, found = tmp_path / "scores.csv", tmp_path / "scores.json"
    code, printed, err = esm_shared("score", targets, candidates, "--out", out, "--json", found)
    assert (code, err) == (0, "")
    assert "one, 33 residues" in printed and "┃      turbo ┃" in printed
    expected = turbo.score(TARGET, ["ACDEF", "WTC", "GGGSG"])
    [first, second] = json.loads(found.read_text())["results"]
    assert (first["target"], second["residues"]) == ("one", len(OTHER))
    assert_close(Scores.from_dict(first["arms"]["turbo"]), expected)
    # The rows below are those of this run.
    expected = Scores.from_dict(first["arms"]["turbo"])
    assert [one["id"] for one in first["candidates"]] == ["a", "b", "c"]
    rows = list(csv.DictReader(out.open()))
    assert [row["target"] for row in rows] == ["one"] * 3 + ["two"] * 3
    assert [row["candidate"] for row in rows[:3]] == ["abc"[i] for i in expected.ranking()]
    assert [int(row["rank"]) for row in rows[:3]] == [1, 2, 3]
    best = expected.scores[expected.ranking()[0]]
    assert float(rows[0]["pseudo_perplexity"]) == best.pseudo_perplexity
    assert float(rows[0]["pseudo_log_likelihood"]) == best.pseudo_log_likelihood


def test_a_csv_candidate_may_name_its_target(esm_shared, targets, write, tmp_path):
    table = write("candidates.csv", "id,Sequence,target,note\na,ACDEF,one,x\n,wtc,two,\nb,GGGSG,,\n")
    found = tmp_path / "scores.json"
    code, _, err = esm_shared("score", targets, table, "--json", found)
    assert (code, err) == (0, "")
    first, second = json.loads(found.read_text())["results"]
    assert [one["id"] for one in first["candidates"]] == ["a", "b"]
    assert second["candidates"] == [{"id": "#2", "sequence": "WTC"}, {"id": "b", "sequence": "GGGSG"}]


def test_identifiers_act_neither_on_a_terminal_nor_in_a_spreadsheet(esm_shared, write, tmp_path):
    targets = write("targets.fasta", f">=1+1[/x]\x1b[2J\n{TARGET}\n")
    names = ["=cmd|'/C calc'!A0", "@x", "[/bold]", "b\x1b[31m", "-2.5", "'=quoted"]
    table, out, again = tmp_path / "candidates.csv", tmp_path / "scores.csv", tmp_path / "again.csv"
    write_csv(table, ["id", "sequence"], [[name, "ACDEF"] for name in names])
    code, printed, err = esm_shared("score", targets, table, "--out", out)
    assert (code, err) == (0, "")
    assert "\x1b" not in printed and "[/bold]" in printed and "b\\x1b[31m" in printed
    content = out.read_text()
    assert "\x1b" not in content
    rows = list(csv.DictReader(out.open()))
    assert {row["candidate"] for row in rows} == {
        "'=cmd|'/C calc'!A0", "'@x", "[/bold]", "b\\x1b[31m", "-2.5", "''=quoted",
    }  # fmt: skip
    assert all(row["target"] == "'=1+1[/x]\\x1b[2J" and float(row["pseudo_log_likelihood"]) < 0 for row in rows)
    # Read back, identifiers are the old ones, also as candidates of another run.
    assert sorted(row["candidate"] for row in read_csv(out, ["candidate"])) == sorted(names)
    write_csv(table, ["id", "sequence", "target"], [[row["candidate"], row["sequence"], row["target"]]
              for row in read_csv(out, ["candidate", "sequence", "target"])])  # fmt: skip
    assert esm_shared("score", targets, table, "--out", again).code == 0
    assert sorted(again.read_text().splitlines()) == sorted(content.splitlines())


def test_bad_records_are_reported_and_the_others_scored(esm_shared, turbo, write, tmp_path):
    targets = write("targets.fasta", f">one\n{TARGET}\n>bad\nMK1T\n")
    table = write("candidates.csv", "id,sequence,target\na,ACDEF,\nb,,\nc,AC-D,\nd,WTC,three\n")
    found = tmp_path / "scores.json"
    out = tmp_path / "scores.csv"
    code, printed, err = esm_shared("score", targets, table, "--json", found, "--out", out)
    assert code == 1
    assert printed.splitlines()[-2:] == [f"1 score written to {out}", "4 records failed, see above"]
    lines = err.splitlines()
    assert lines == [
        f"esm-turbo: error: {targets}, record 'bad': position 3 is '1', not one of the 25 residue codes (A to Z without"
        " J); remove numbers from the sequence",
        f"esm-turbo: error: {table}, record 'b (line 3)': holds no residues; give a sequence or remove the record",
        f"esm-turbo: error: {table}, record 'c (line 4)': position 3 is '-', not one of the 25 residue codes (A to Z"
        " without J); remove gaps (--remove-gaps, in Python remove_gaps=True)",
        f"esm-turbo: error: {table}, record 'd (line 5)': there is no usable target 'three'; there are 'one'",
    ]
    result = json.loads(found.read_text())
    assert [one["record"] for one in result["failed"]] == ["bad", "b (line 3)", "c (line 4)", "d (line 5)"]
    [only] = result["results"]
    assert_close(Scores.from_dict(only["arms"]["turbo"]), turbo.score(TARGET, "ACDEF"))


def test_a_target_that_does_not_fit_into_memory_is_reported(esm_shared, targets, candidates, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10)
    code, printed, err = esm_shared("score", targets, candidates)
    assert (code, printed) == (1, "2 records failed, see above\n")
    for line, name, tokens in zip(err.splitlines(), ("one", "two"), (1 + 33 + 3 + 1, 1 + 18 + 3 + 1), strict=True):
        assert line.startswith(f"esm-turbo: error: {targets}, record '{name}': {tokens} tokens at once need about")
        assert "0 MiB are free on cpu" in line


@pytest.mark.parametrize(
    ("which", "text", "message"),
    [
        ("targets", "", "is empty"),
        ("targets", ">a\nM1\n", "no usable record"),
        ("candidates", "", "is empty"),
        ("candidates", ">a\n\n>b\nA-\n", "no usable record"),
        ("csv", "id,peptide\na,ACD\n", "lacks the column 'sequence' (or 'binder'); there are 'id', 'peptide'"),
    ],
)
def test_unusable_files_are_refused(esm_shared, targets, candidates, write, tmp_path, which, text, message):
    path = write("bad.csv" if which == "csv" else "bad.fasta", text)
    first, second = (path, candidates) if which == "targets" else (targets, path)
    out = tmp_path / "scores.csv"
    code, printed, err = esm_shared("score", first, second, "--out", out)
    assert (code, printed) == (2, "")
    assert err.splitlines()[-1].startswith(f"esm-turbo: error: {path}")
    assert message in err.splitlines()[-1]
    assert not out.exists()


def test_arms_and_options_reach_the_scores(esm_shared, targets, candidates):
    options = ["--arm", "turbo", "full", "--top-k", 2, "--place", "empty", "--refresh", 0]
    code, printed, _ = esm_shared("score", targets, candidates, *options, "--json", "-")
    first = json.loads(printed)["results"][0]
    assert (code, first["arms"]["turbo"]["place"], first["arms"]["turbo"]["refresh"]) == (0, "empty", 0)
    assert list(first["agreement"]) == ["turbo"]
    assert (first["agreement"]["turbo"]["count"], first["agreement"]["turbo"]["top_k"]) == (3, 2)


def test_the_shipped_targets_and_peptides_can_be_read():

    folder = evaluation_proteins().parent
    targets = read_fasta_strict(folder / "peptide_target_6pv9.fasta")
    good, bad = read_candidates(folder / "peptide_targets_dev.csv", targets)
    assert (len(good), bad) == (92, [])
    receptors = [
        row["Receptor Sequence"] for row in read_csv(folder / "peptide_targets_dev.csv", ["Receptor Sequence"])
    ]
    assert [normalize_sequence(one, name="receptor") for one in receptors] == receptors
    assert targets[0].sequence in receptors


def test_a_stopped_command_continues_where_it_was(esm_shared, targets, candidates, tmp_path, monkeypatch):
    out, whole = tmp_path / "scores.csv", tmp_path / "whole.csv"
    # A piece per candidate and target.
    monkeypatch.setattr("esm_turbo.tasks.common.pieces.TOKENS_PER_PIECE", 1600)
    assert esm_shared("score", targets, candidates, "--out", whole).code == 0
    add = Journal.add

    def stop(self: Journal, key: str, value: object) -> None:
        add(self, key, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        early = esm_shared("score", targets, candidates, "--out", out)
        patch.setattr(Journal, "add", stop)
        late = esm_shared("score", targets, candidates, "--out", out)
        # Said before the next part is run.
        later = esm_shared("score", targets, candidates, "--out", out)
        # Nothing that was kept is lost by a slip.
        parts = tmp_path / ".scores.csv.parts"
        for slip in (["--refresh", 3], ["--place", "empty"]):
            other = esm_shared("score", targets, candidates, "--out", out, *slip)
            assert other.code == 2 and f"{parts}: holds results of a run that was stopped" in other.err
        more = esm_shared("score", targets, candidates, "--out", out, "--rescore", 2)
    assert early.err == "esm-turbo: interrupted before any result was kept\n"
    assert late.err == "esm-turbo: interrupted; the same command continues where it was\n"
    assert "continuing a run that was stopped: of 6 parts of the stage 'score', 1 is done" in later.err
    assert "continuing a run that was stopped: of 6 parts of the stage 'score', 2 are done" in more.err
    assert [one.code for one in (early, late, later, more)] == [130] * 4 and not out.exists()
    result = esm_shared("score", targets, candidates, "--out", out)
    assert "continuing a run that was stopped: of 6 parts of the stage 'score', 3 are done" in result.err
    assert out.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()
    assert "that was stopped" not in esm_shared("score", targets, candidates, "--out", out).err


def test_stages_of_two_models_are_no_table(esm_shared, turbo, targets, candidates, tmp_path, monkeypatch):
    own, out = copy.deepcopy(turbo), tmp_path / "scores.csv"
    monkeypatch.setattr(TurboEsm, "from_pretrained", lambda *arguments, **options: own)

    def rescore(*arguments):
        own.model.lm_head.bias.data[5] += 1
        screens_rescore(*arguments)

    screens_rescore = screens.rescore
    monkeypatch.setattr(screens, "rescore", rescore)
    result = esm_shared("score", targets, candidates, "--rescore", 1, "--out", out)
    assert result.code == 2 and "the model has changed since the run began" in result.err and not out.exists()


def test_pairs_of_pepmlm(esm_shared, write, tmp_path):
    pairs = write("pairs.csv", "Receptor Sequence,Binder,PPL\nMKTAYIAKQR,GSW,3.0\nGSGSPLL,ACDE,4.7\n")
    out = tmp_path / "scores.csv"
    code, _, err = esm_shared("score", pairs, "--out", out)
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(out.open()))
    assert [(row["target"], row["sequence"], row["PPL"]) for row in rows] == [
        ("target_1", "GSW", "3.0"), ("target_2", "ACDE", "4.7"),
    ]  # fmt: skip
    fasta = write("targets.fasta", ">t\nMKTAYIAKQR\n")
    refused = esm_shared("score", fasta)
    assert refused.code == 2 and "targets alone; give candidates too" in refused.error
