"""Candidates and targets of files: reading them, arms side by side, failures, and the table that is written."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from esm_turbo import TurboEsm
from esm_turbo.files.csv_files import CsvError
from esm_turbo.files.journal import Journal
from esm_turbo.proteins.fasta import BadRecord, FastaError, ProteinRecord
from esm_turbo.tasks.common.run_info import RunInfo
from esm_turbo.tasks.scoring.records import COLUMNS, Candidate, read_candidates, read_pairs, score_records
from esm_turbo.tasks.scoring.score import Scores, TargetRows
from tests.helpers.scores import assert_close

TARGETS = [ProteinRecord("one", "MKTAYIAKQRQISFVK"), ProteinRecord("two", "GSWKDLAEPL")]
CANDIDATES = [Candidate("a", "ACDEF"), Candidate("b", "WTC"), Candidate("c", "GGGSG", "two")]


def test_candidates_of_a_fasta_file(tmp_path: Path) -> None:
    path = tmp_path / "candidates.fasta"
    path.write_text(">a\nacdef\n>b\nW-C\n")
    good, bad = read_candidates(path, TARGETS)
    assert good == [Candidate("a", "ACDEF")]
    assert [one.record for one in bad] == ["b"]
    assert read_candidates(path, TARGETS, remove_gaps=True)[0][1] == Candidate("b", "WC")


def test_candidates_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text("id,Sequence,target\na,ACDEF,one\n,wtc,\nb,,\nc,AC-D,\nd,WTC,three\n")
    good, bad = read_candidates(path, TARGETS)
    assert [(c.id, c.sequence, c.target) for c in good] == [("a", "ACDEF", "one"), ("#2", "WTC", None)]
    assert [one.record for one in bad] == ["b (line 4)", "c (line 5)", "d (line 6)"]
    assert bad[1].reason.startswith("position 3 is '-'")
    assert bad[2].reason == "there is no usable target 'three'; there are 'one', 'two'"


def test_a_list_of_candidates_is_told_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "candidates.fasta"
    path.write_text("ACDEF\nWTC\n")
    with pytest.raises(FastaError, match=r"put one before each sequence, or give the file a name that ends in \.txt$"):
        read_candidates(path, TARGETS)
    path.write_text("sequence\nACDEF\nWTC\n")
    good, bad = read_candidates(path.rename(path.with_suffix(".csv")), TARGETS)
    assert ([one.sequence for one in good], bad) == (["ACDEF", "WTC"], [])
    path.write_text("a note\n")
    with pytest.raises(FastaError, match=r"give protein sequences in FASTA format$"):
        read_candidates(path, TARGETS)


def test_a_list_has_one_sequence_per_line(tmp_path: Path) -> None:
    path = tmp_path / "candidates.TXT"
    path.write_bytes(b"\xef\xbb\xbfacdef\r\n\r\n  WTC*\r\nACDJ\r\nA-C\r\nACDEF")
    good, bad = read_candidates(path, TARGETS)
    assert good == [Candidate("#1", "ACDEF"), Candidate("#2", "WTC"), Candidate("#5", "ACDEF")]
    assert [(one.record, one.reason[:17]) for one in bad] == [("#3", "position 4 is 'J'"), ("#4", "position 2 is '-'")]
    good, bad = read_candidates(path, TARGETS, unknown="X", remove_gaps=True)
    assert [one.sequence for one in good] == ["ACDEF", "WTC", "ACDX", "AC", "ACDEF"] and not bad
    # The ending alone makes no list.
    path.write_text("\n>a\nACD\nEFG\n")
    assert read_candidates(path, TARGETS)[0] == [Candidate("a", "ACDEFG")]
    path.write_text("\n")
    with pytest.raises(FastaError, match="is empty"):
        read_candidates(path, TARGETS)


@pytest.mark.parametrize("line", ["ACD EFG", "pep1,ACDEF", "WTC\t0.5", ">a", "ACD1", "Ä"])
def test_a_list_with_anything_else_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "candidates.txt"
    path.write_text(f"ACDEF\n\n{line}\nWTC\n", encoding="utf-8")
    with pytest.raises(FastaError, match="line 3 is ") as caught:
        read_candidates(path, TARGETS)
    assert repr(line) in str(caught.value) and "one sequence per line" in str(caught.value)


@pytest.mark.parametrize("head", ["sequence", "Binder", "peptides", "Candidate", "seq"])
def test_a_list_does_not_begin_with_the_name_of_a_column(tmp_path: Path, head: str) -> None:
    path = tmp_path / "candidates.txt"
    path.write_text(f"{head}\nACDEF\n")
    with pytest.raises(FastaError, match=f"line 1 is '{head}', not a sequence of residues"):
        read_candidates(path, TARGETS)


@pytest.mark.parametrize(
    ("candidate", "label"),
    [
        (Candidate("pep 1", "ACDEF"), "pep 1"),
        (Candidate("#1", "A" * 24), "A" * 24),
        (Candidate("#12", "ACDEFGHIKL" + "W" * 20), "ACDEFGHIKL...WWWWW #12"),
    ],
)
def test_candidates_without_identifiers_are_shown_by_their_residues(candidate: Candidate, label: str) -> None:
    assert candidate.label == label


@pytest.mark.parametrize("text", ["nan", "NaN", "None", "null"])
def test_a_cell_without_a_value_is_no_peptide(tmp_path: Path, text: str) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text(f"sequence\n{text}\n{text.upper()}\n")
    [good], [bad] = read_candidates(path, TARGETS)
    assert good.sequence == text.upper()
    assert bad == BadRecord("candidate (line 2)", f"says {text!r}, which stands for no sequence")


def test_a_list_may_begin_with_the_peptide_peptide(tmp_path: Path) -> None:
    path = tmp_path / "candidates.txt"
    path.write_text("PEPTIDE\nACDEF\n")
    assert [one.sequence for one in read_candidates(path, TARGETS)[0]] == ["PEPTIDE", "ACDEF"]


def test_a_space_inside_a_candidate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text("sequence\n ACD \nACD EFG\n")
    [good], [bad] = read_candidates(path, TARGETS)
    assert good.sequence == "ACD"
    assert bad == BadRecord("candidate (line 3)", "has a space inside; remove it, or write two rows")


@pytest.mark.parametrize("target", ["one", TARGETS[0].sequence, TARGETS[0].sequence.lower()])
def test_a_target_is_an_identifier_or_a_sequence(tmp_path: Path, target: str) -> None:
    path = tmp_path / "candidates.tsv"
    path.write_text(f"Target\tBinder\tnote\n{target}\tACDEF\tx\n")
    assert read_candidates(path, TARGETS) == ([Candidate("#1", "ACDEF", "one", {"note": "x"})], [])


def test_wrong_targets_are_one_message(tmp_path: Path) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text("sequence,target\n" + "".join(f"ACDEF,x{i}\n" for i in range(50)))
    with pytest.raises(
        CsvError, match=r"no row names a usable target, but 'x0', 'x1', 'x2' and 47 more; there are 'one', 'two'$"
    ):
        read_candidates(path, TARGETS)
    path.write_text(path.read_text() + "WTC,two\n")
    good, [bad] = read_candidates(path, TARGETS)
    assert [one.target for one in good] == ["two"]
    assert bad.record == "lines 2, 3, 4 and 47 more"


@pytest.mark.parametrize(
    ("text", "message"),
    [("sequence\n", "holds no candidates"), ("id\na\n", "lacks the column 'sequence'"), ("", "is empty")],
)
def test_files_without_candidates(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text(text)
    with pytest.raises(CsvError, match=message):
        read_candidates(path, TARGETS)


def test_every_candidate_on_its_targets_in_every_arm(turbo: TurboEsm) -> None:
    calls: list[tuple[str, int, int]] = []
    run = score_records(
        turbo, TARGETS, CANDIDATES, ["turbo", "full"], top_k=1, progress=lambda *call: calls.append(call)
    )
    assert run.failed == []
    one, two = run.results
    assert [c.id for c in one.candidates] == ["a", "b"]
    assert [c.id for c in two.candidates] == ["a", "b", "c"]
    assert_close(one.scores["turbo"], turbo.score(TARGETS[0].sequence, ["ACDEF", "WTC"]))
    assert two.scores["full"] == turbo.score(TARGETS[1].sequence, ["ACDEF", "WTC", "GGGSG"], arm="full")
    # The others are compared with the full arm.
    assert (two.reference, set(two.agreement)) == ("full", {"turbo"})
    assert two.agreement["turbo"] == two.scores["turbo"].agreement(two.scores["full"], 1)
    assert two.ranking() == two.scores["full"].ranking()
    total = 2 * (8 + 13)
    assert calls[-1] == ("score", total, total)
    assert {(stage, whole) for stage, _, whole in calls} == {("score", total)}
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})


def test_without_the_full_arm_the_first_one_is_the_reference(turbo: TurboEsm) -> None:
    [result] = score_records(turbo, iter(TARGETS[:1]), iter(CANDIDATES[:2]), ["frozen", "turbo"]).results
    assert (result.reference, set(result.agreement)) == ("frozen", {"turbo"})


def test_candidates_made_by_hand_are_checked_as_those_of_a_call(turbo: TurboEsm) -> None:
    wrong = [Candidate("mask", "A<mask>C"), Candidate("two", "ACD EFG"), Candidate("letter", "AJC")]
    run = score_records(turbo, TARGETS[:1], [*wrong, Candidate("good", "ACD")], ["frozen"])
    assert [one.id for one in run.results[0].candidates] == ["good"]
    assert [one.record for one in run.failed] == ["mask", "two", "letter"]
    assert "holds a <mask>, which has no likelihood" in run.failed[0].reason


def test_an_identifier_names_one_target(turbo: TurboEsm) -> None:
    with pytest.raises(ValueError, match="identifier 'a' names two sequences"):
        score_records(turbo, [ProteinRecord("a", "MKTAY"), ProteinRecord("a", "MKWAY")], CANDIDATES, ["frozen"])


def test_without_a_background_candidates_are_ranked_by_likelihood(turbo: TurboEsm) -> None:
    [found] = score_records(turbo, TARGETS[:1], CANDIDATES, ["frozen"], sort_by="specificity").results
    assert found.ranking() == found.scores["frozen"].ranking("likelihood")
    with pytest.raises(ValueError, match="`by` 'specificity' needs scores with a `background`"):
        found.scores["frozen"].ranking("specificity")


def test_scores_that_are_not_finite_are_set_apart(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TargetRows.result

    def broken(self: TargetRows, predicted: Sequence[Tensor]) -> Scores:
        """NaN for the candidate WTC in one arm, and for everything on the second target."""
        found = original(self, predicted)
        wrong = {"WTC"} if self.arm == "turbo" else set()
        if self.residues == len(TARGETS[1].sequence):
            wrong = {one.candidate for one in found.scores}
        made = (
            replace(one, log_probabilities=(math.nan,) * len(one.candidate)) if one.candidate in wrong else one
            for one in found.scores
        )
        return replace(found, scores=tuple(made))

    monkeypatch.setattr(TargetRows, "result", broken)
    run = score_records(turbo, TARGETS, CANDIDATES, ["turbo", "frozen"])
    assert [one.record for one in run.failed] == ["b on one", "a on two", "b on two", "c on two"]
    assert {one.reason for one in run.failed} == {"its score is not finite; try --dtype float32"}
    [result] = run.results
    assert [c.id for c in result.candidates] == ["a"]
    assert [one.candidate for one in result.scores["frozen"].scores] == ["ACDEF"]


def test_the_table_has_a_row_per_candidate_and_arm(turbo: TurboEsm, tmp_path: Path) -> None:
    run = score_records(turbo, TARGETS, CANDIDATES, ["turbo", "frozen"])
    run.write(tmp_path / "scores.csv")
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    run.write(tmp_path / "used.csv", RunInfo.of(turbo, ["turbo", "frozen"]))
    with (tmp_path / "used.csv").open() as file:
        presets = {(row["arm"], row["run_preset"]) for row in csv.DictReader(file)}
    assert presets == {("turbo", "turbo3"), ("frozen", "exact")}
    assert [(row["target"], row["arm"]) for row in rows] == [
        (target, arm) for target, n in (("one", 2), ("two", 3)) for _ in range(n) for arm in ("turbo", "frozen")
    ]
    for result in run.results:
        own = [row for row in rows if row["target"] == result.target.id]
        for arm, scores in result.scores.items():
            ranked = sorted((row for row in own if row["arm"] == arm), key=lambda row: int(row["rank"]))
            assert [row["candidate"] for row in ranked] == [result.candidates[i].id for i in scores.ranking()]
            best = scores.scores[scores.ranking()[0]]
            assert float(ranked[0]["pseudo_perplexity"]) == best.pseudo_perplexity
            assert float(ranked[0]["pseudo_log_likelihood"]) == best.pseudo_log_likelihood


def test_other_columns_of_the_input_are_kept(turbo: TurboEsm, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ID,binder,assay,rank,Full_Rank,specificity\na,ACDEF,=x,9,1,2\nb,WTC,y,8,,1\n")
    candidates, _ = read_candidates(tmp_path / "a.csv", TARGETS)
    run = score_records(turbo, TARGETS, candidates, ["turbo", "frozen"])
    run.write(tmp_path / "scores.csv")
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == (*COLUMNS, "assay") and run.left_out() == ["rank", "Full_Rank", "specificity"]
    assert len(rows) == 8 and {(row["candidate"], row["assay"]) for row in rows} == {("a", "'=x"), ("b", "y")}
    # What was written can be read, and keeps the names.
    again, _ = read_candidates(tmp_path / "scores.csv", TARGETS)
    assert [(one.id, one.target) for one in again] == [(row["candidate"], row["target"]) for row in rows]


def test_columns_that_are_read_depend_on_no_row(tmp_path: Path) -> None:
    """A column of names beside one of residues, and either name of a candidate."""
    table = tmp_path / "pairs.csv"
    table.write_text("Receptor Sequence,Binder,target,id,candidate\nMKT,GSW,EGFR,,c1\nMKT,WTC,EGFR,b,\n")
    _, candidates, _ = read_pairs(table)
    assert [(one.id, one.columns) for one in candidates] == [(name, {"target": "EGFR"}) for name in ("c1", "b")]
    table.write_text("Receptor Sequence,Binder,id,candidate\nMKT,GSW,,c1\nMKT,WTC,b,c2\n")
    with pytest.raises(CsvError, match="line 3 has an 'id' and a 'candidate', other rows one of both; leave one"):
        read_pairs(table)


def test_other_candidates_are_another_run(turbo: TurboEsm, tmp_path: Path) -> None:
    score_records(turbo, TARGETS, CANDIDATES, ["turbo"], journal=Journal(tmp_path))
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match="of a run that was stopped, of other inputs, options or versions"):
        score_records(turbo, TARGETS, CANDIDATES[:1], ["turbo"], journal=journal)
    assert journal.found == 0


@pytest.mark.parametrize(
    "head", ["Binder,Receptor Sequence,Sequence Length,PPL", "Receptor Sequence,Binder,Sequence Length,PPL"]
)
def test_pairs_of_pepmlm_are_read(tmp_path, head: str) -> None:
    rows = [("KPLX", "MKTAY"), ("GS", "GSGSX"), ("AC", "mktay"), ("A1", "MKTAY"), ("GS", "MK TA")]
    first = head.startswith("Binder")
    lines = [",".join([*(pair if first else pair[::-1]), "4", "15.7"]) for pair in rows]
    path = tmp_path / "test.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    targets, candidates, bad = read_pairs(path)
    assert [(one.id, one.sequence) for one in targets] == [
        ("target_1", "MKTAY"), ("target_2", "GSGSX"), ("target_3", "MKTA"),
    ]  # fmt: skip
    assert [(one.id, one.sequence, one.target) for one in candidates] == [
        ("#1", "KPLX", "target_1"), ("#2", "GS", "target_2"), ("#3", "AC", "target_1"), ("#5", "GS", "target_3"),
    ]  # fmt: skip
    assert [one.record for one in bad] == ["candidate (line 5)"]
    assert candidates[0].columns["PPL"] == "15.7"


def test_what_pepmlm_generates_is_read(tmp_path) -> None:
    path = tmp_path / "generated.tsv"
    path.write_text("Input Sequence\tBinder\tPseudo Perplexity\nMKTAY\tGS\t9.6\n")
    targets, [candidate], bad = read_pairs(path)
    assert (targets[0].sequence, candidate.sequence, bad) == ("MKTAY", "GS", [])


def test_two_columns_of_receptors_are_refused(tmp_path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("Receptor Sequence,Input Sequence,Binder\nMKTAY,MKTAYGGG,GS\n")
    with pytest.raises(CsvError, match="has the columns 'Receptor Sequence' and 'Input Sequence', which mean the same"):
        read_pairs(path)


def test_targets_alone_are_refused(tmp_path) -> None:
    fasta, table = tmp_path / "t.fasta", tmp_path / "t.csv"
    fasta.write_text(">t\nMKTAY\n")
    table.write_text("binder\nGS\n")
    with pytest.raises(CsvError, match="targets alone; give candidates too, or a table of pairs"):
        read_pairs(fasta)
    with pytest.raises(CsvError, match="lacks the column 'Receptor Sequence' or 'Input Sequence'"):
        read_pairs(table)
