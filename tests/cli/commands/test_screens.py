"""`esm-turbo score`: backgrounds, rescoring, unknown residues, pairs by column, and shards of all that."""

from __future__ import annotations

import csv
import hashlib
import json

import pytest

from esm_turbo.parallel.merge import merge
from esm_turbo.parallel.shards import shards_folder, shards_state

TARGETS = {"one": "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ", "two": "GSWKDLAEPLLKRRVWTC", "three": "MVLSPADKTNVKAAW"}
CANDIDATES = {"a": "ACDEF", "b": "WTC", "c": "GGGSG", "d": "KRKRK"}


@pytest.fixture
def targets(write):
    return write("targets.fasta", "".join(f">{name}\n{one}\n" for name, one in TARGETS.items()))


@pytest.fixture
def candidates(write):
    return write("candidates.fasta", "".join(f">{name}\n{one}\n" for name, one in CANDIDATES.items()))


def rows_of(path):
    return list(csv.DictReader(path.open()))


def test_candidates_are_compared_with_the_other_targets(esm_shared, turbo, targets, candidates, tmp_path):
    out = tmp_path / "scores.csv"
    code, printed, _ = esm_shared("score", targets, candidates, "--out", out, "--sort-by", "specificity")
    assert code == 0 and "specificity ┃" in printed and "nats ┃" in printed
    expected = turbo.score_pairs(list(TARGETS.values()), list(CANDIDATES.values()))
    rows = rows_of(out)
    for number, (name, found) in enumerate(zip(TARGETS, expected.scores, strict=True)):
        own = rows[4 * number : 4 * number + 4]
        assert [row["target"] for row in own] == [name] * 4 and [row["rank"] for row in own] == list("1234")
        values = {one.candidate: one.specificity for one in found.scores}
        assert {row["sequence"]: float(row["specificity"]) for row in own} == pytest.approx(values, abs=1e-3)
        shown = [float(row["specificity"]) for row in own]
        assert shown == sorted(shown, reverse=True)
        # Three targets are too few for standard deviations.
        assert {row["specificity_z"] for row in own} == {""}
        assert {row["run_background"] for row in own} == {"2 other targets"}


def test_a_matrix_is_written_and_decoys_say_what_they_cost(esm_shared, targets, candidates, write, tmp_path):
    write("decoys.fasta", f">d\n{TARGETS['one'][::-1]}\n")
    matrix = tmp_path / "matrix.csv"
    options = ["--background", tmp_path / "decoys.fasta", "--matrix", matrix, "--top", 0]
    code, _, err = esm_shared("score", targets, candidates, *options)
    assert code == 0 and f"matrix written to {matrix}" in err
    assert f"also scored on 1 other protein, for its specificity: {1 + 1 / len(TARGETS):.3g} times the work" in err
    rows = rows_of(matrix)
    assert [row["target"] for row in rows] == list(TARGETS)
    assert list(rows[0]) == ["target", "number", *CANDIDATES]
    assert {row["number"] for row in rows} == {"mean log p (nats per residue)"}


@pytest.mark.parametrize("background", ["alone", "decoys.fasta"])
def test_one_target_is_compared_with_no_target_or_decoys(esm_shared, turbo, candidates, write, tmp_path, background):
    target = write("target.fasta", f">one\n{TARGETS['one']}\n")
    decoys = write("decoys.fasta", f">x\n{TARGETS['two']}\n>y\n{TARGETS['three']}\n")
    out, found = tmp_path / "scores.csv", tmp_path / "scores.json"
    given = decoys if background == "decoys.fasta" else background
    assert esm_shared("score", target, candidates, "--background", given, "--out", out, "--json", found).code == 0
    residues = f"{TARGETS['two']}\n{TARGETS['three']}".encode()
    stated = {"file": "decoys.fasta", "sha256": hashlib.sha256(residues).hexdigest()}
    assert json.loads(found.read_text())["run"]["background"] == (background if background == "alone" else stated)
    kind = "alone" if background == "alone" else [TARGETS["two"], TARGETS["three"]]
    expected = turbo.score(TARGETS["one"], list(CANDIDATES.values()), background=kind)
    values = {one.candidate: one.specificity for one in expected.scores}
    assert {row["sequence"]: float(row["specificity"]) for row in rows_of(out)} == pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize("command", ["score", "binders"])
def test_bad_decoys_are_failures(esm_shared, candidates, write, tmp_path, command):
    target, decoys = write("target.fasta", ">t\nMKTAYIAK\n"), write("decoys.fasta", ">a\nMSDNGPQNQ\n>b\nMK1\n")
    given = [target, candidates] if command == "score" else [target, "--length", 3, "--num-return-sequences", 2]
    result = esm_shared(command, *given, "--background", decoys, "--json", tmp_path / "found.json")
    assert result.code == 1 and f"{decoys}, record 'b'" in result.err
    assert [one["record"] for one in json.loads((tmp_path / "found.json").read_text())["failed"]] == ["b"]


def test_without_a_background_the_table_has_no_such_columns(esm_shared, targets, candidates, tmp_path):
    out = tmp_path / "scores.csv"
    assert esm_shared("score", targets, candidates, "--background", "none", "--out", out).code == 0
    assert "specificity" not in rows_of(out)[0]


@pytest.mark.parametrize(
    ("sort_by", "background"), [("likelihood", "targets"), ("specificity", "targets"), ("specificity", "alone")]
)
def test_the_best_are_scored_again(esm_shared, turbo, targets, candidates, tmp_path, sort_by, background):
    out, found = tmp_path / "scores.csv", tmp_path / "scores.json"
    options = ["--rescore", 2, "--out", out, "--json", found, "--sort-by", sort_by, "--background", background]
    code, printed, _ = esm_shared("score", targets, candidates, *options)
    assert code == 0 and "by full" in printed
    [exact, *_] = turbo.score_pairs(
        list(TARGETS.values()), list(CANDIDATES.values()), arm="full", background=background
    ).scores
    values = {one.candidate: one.pseudo_perplexity for one in exact.scores}
    specificities = {one.candidate: one.specificity for one in exact.scores}
    rows = rows_of(out)[:4]
    assert [bool(row["full_rank"]) for row in rows] == [True, True, False, False]
    assert sorted(row["full_rank"] for row in rows[:2]) == ["1", "2"]
    for row in rows[:2]:
        assert float(row["full_pseudo_perplexity"]) == pytest.approx(values[row["sequence"]], rel=1e-5)
        if sort_by == "specificity":
            assert float(row["full_specificity"]) == pytest.approx(specificities[row["sequence"]], abs=1e-4)
        assert row["full_specificity_z"] == ""
    again = json.loads(found.read_text())["results"][0]["rescored"]
    assert [one["rank"] for one in again] == [1, 2] and {one["full_rank"] for one in again} == {1, 2}
    columns = ("sequence", "full_rank", "full_specificity")
    assert [tuple("" if one[name] is None else str(one[name]) for name in columns) for one in again] == [
        tuple(row[name] for name in columns) for row in rows[:2]
    ]
    by = "full_pseudo_perplexity" if sort_by == "likelihood" else "full_specificity"
    ranked = sorted(again, key=lambda one: one[by], reverse=sort_by == "specificity")
    assert [one["full_rank"] for one in ranked] == [1, 2]


def test_unknown_residues_are_left_out(esm_shared, turbo, write, tmp_path):
    target = write("target.fasta", f">one\n{TARGETS['one']}\n")
    candidates = write("candidates.fasta", ">a\nACXEF\n>b\nXXX\n>c\nWTC\n")
    out = tmp_path / "scores.csv"
    code, _, err = esm_shared("score", target, candidates, "--out", out)
    assert code == 1 and "2 of 3 candidates hold B, X or Z, which are left out" in err
    assert "record 'b on one': it holds none but unknown residues" in err
    [one] = turbo.score(TARGETS["one"], ["ACXEF"]).scores
    known = [value for letter, value in zip("ACXEF", one.log_probabilities, strict=True) if letter != "X"]
    assert one.mean_log_probability == pytest.approx(sum(known) / 4)
    found = {row["candidate"]: float(row["pseudo_log_likelihood"]) for row in rows_of(out)}
    assert found["a"] == pytest.approx(sum(known), abs=1e-3)
    code, _, err = esm_shared("score", target, candidates, "--out", out, "--unknown-residues", "score")
    found = {row["candidate"]: float(row["pseudo_log_likelihood"]) for row in rows_of(out)}
    assert code == 0 and found["a"] == pytest.approx(sum(one.log_probabilities), abs=1e-3)


def test_a_table_of_targets_and_binders_works_alone(esm_shared, write, tmp_path):
    table = write("pairs.csv", f"target,binder\n{TARGETS['one']},ACDEF\n{TARGETS['two']},WTC\n{TARGETS['two']},ACDEF\n")
    out = tmp_path / "scores.csv"
    assert esm_shared("score", table, "--out", out).code == 0
    assert [(row["target"], row["sequence"]) for row in rows_of(out) if row["target"] == "target_1"] == [
        ("target_1", "ACDEF")
    ]
    assert esm_shared("score", table, "--pairs", "all", "--out", out).code == 0
    assert sorted((row["target"], row["sequence"]) for row in rows_of(out)) == [
        ("target_1", "ACDEF"), ("target_1", "WTC"), ("target_2", "ACDEF"), ("target_2", "WTC")
    ]  # fmt: skip


def test_on_all_targets_a_candidate_that_is_repeated_counts_once(esm_shared, write, tmp_path):
    target, out = write("target.fasta", f">one\n{TARGETS['one']}\n"), tmp_path / "scores.csv"
    table = write("candidates.csv", "id,sequence,note\na,ACDEF,1\nb,WTC,2\ncopy,ACDEF,3\na,ACDEF,4\n")
    code, _, err = esm_shared("score", target, table, "--pairs", "all", "--out", out)
    assert code == 0 and "of 4 rows, 1 repeat a candidate: its first row stands" in err
    assert sorted((row["candidate"], row["note"]) for row in rows_of(out)) == [("a", "1"), ("b", "2"), ("copy", "3")]


@pytest.mark.parametrize("sort_by", ["likelihood", "specificity"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_merged_shards_equal_one_run(esm_shared, targets, candidates, tmp_path, sort_by, suffix):
    whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"scores.{suffix}"
    options = ["--sort-by", sort_by, "--arm", "frozen", "turbo"]
    assert esm_shared("score", targets, candidates, "--out", whole, *options).code == 0
    for shard in ("1/2", "2/2"):
        assert esm_shared("score", targets, candidates, "--out", out, *options, "--shard", shard).code == 0
    merge(out, shards_state(out))
    if suffix == "csv":
        # A shard does not know all targets.
        assert all("specificity" not in rows_of(one)[0] for one in shards_folder(out).glob("shard-*.csv"))
        assert out.read_text() == whole.read_text()
    else:
        from pyarrow import parquet

        assert parquet.read_table(out).to_pylist() == parquet.read_table(whole).to_pylist()


def test_rows_of_a_screen_are_compared_by_all_pairs(esm_shared, targets, write):
    rows = write("rows.csv", "target,candidate,sequence\none,#7,ACDEF\ntwo,#9,WTC\n")
    code, _, err = esm_shared("score", targets, rows, "--sort-by", "specificity")
    assert code == 2 and "give --pairs all, or --background alone" in err
