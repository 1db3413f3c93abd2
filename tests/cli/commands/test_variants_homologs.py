"""`--homologs` of `esm-turbo variants` and `store`: scores of E1, what is recorded and stored, what is refused."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from esm_turbo import TurboEsm, read_homologs
from esm_turbo.cli import homologs
from esm_turbo.context_store import context_key
from tests.helpers.models import E1_MINI

PROTEIN = "MKNKVVVVTGVPGVGGTT"
HOMOLOGS = ("MKNKVVVIVGVPGVGSTT", "--MKIGIVTGIPGVGKST", "MRHpfKVVVVTGVPGVGKTT", "MKNKVVVVTGVPGVGSTT")
FAMILY = f">wt\n{PROTEIN}\n" + "".join(f">{name}\n{row}\n" for name, row in zip("abcd", HOMOLOGS, strict=True))


@pytest.fixture(scope="module")
def e1() -> TurboEsm:
    # Without one, contexts are exact.
    return TurboEsm.from_pretrained(E1_MINI, calibration=False, device="cpu")


@pytest.fixture
def run(esm, e1, write, monkeypatch):
    """Score variants of the protein by E1, with these options."""
    protein = write("protein.fasta", f">wt\n{PROTEIN}\n")
    monkeypatch.setattr(TurboEsm, "from_pretrained", lambda *arguments, **options: e1)
    return lambda *options: esm("variants", protein, *options)


@pytest.fixture
def family(write):
    return write("family.a3m", FAMILY)


def test_homologs_that_do_not_look_like_the_protein_are_mentioned(run, write):
    others = write("others.fasta", ">x\nWCWCHWCCWHWCCWHWCH\n>y\nDDEDEEDPDDEEPDDEDE\n")
    code, _, err = run("--homologs", others, "--max-similarity", 1.0, "--method", "wild_type")
    assert code == 0 and "esm-turbo: warning:" in err and "no sequence aligns with wt much better" in err


def test_a_family_that_changes_while_it_is_read_is_refused(run, family, monkeypatch):
    digests = iter(["1", "2"])
    monkeypatch.setattr(homologs, "sha256_file", lambda path: next(digests))
    code, _, err = run("--homologs", family)
    assert code == 2 and f"{family}: has changed while it was read; run it again" in err


def test_scores_are_those_in_python_and_say_what_was_drawn(run, e1, family, write, tmp_path):
    table = write("variants.csv", "mutant\nM1A\nV5A:T9S\n")
    out, found = tmp_path / "scores.csv", tmp_path / "scores.json"
    options = ("--context-tokens", 40, 80, "--max-similarity", 0.95, "0.9", "--seed", 3)
    code, _, err = run(table, "--homologs", family, *options, "--out", out, "--json", found)
    assert (code, err) == (0, f"esm-turbo: {family}: 4 contexts of 2 to 4 of 4 homologs\n")
    contexts = read_homologs(family, PROTEIN).sample_several((40, 80), max_similarity=(0.95, 0.9), seed=3)
    expected = e1.score_variants(PROTEIN, ["M1A", "V5A:T9S"], context=contexts)
    result = json.loads(found.read_text())
    drawn = result["run"]["homologs"]
    assert drawn["contexts"] == [one.to_dict() for one in contexts]
    assert [one["seed"] for one in drawn["contexts"]] == [3, 4, 5, 6] and drawn["file"] == "family.a3m"
    [arm] = result["results"][0]["arms"].values()
    assert arm["contexts"] == 4
    assert [one["score"] for one in arm["variants"]] == pytest.approx(expected.values, abs=1e-5)
    rows = list(csv.DictReader(out.open()))
    assert [float(row["frozen"]) for row in rows] == pytest.approx(expected.values, abs=1e-5)
    # Again the same; another seed is another run, not the rest of this one.
    first = out.read_text()
    assert run(table, "--homologs", family, *options, "--out", out).code == 0 and out.read_text() == first
    assert run(table, "--homologs", family, *options[:-1], 4, "--out", out).code == 0 and out.read_text() != first


def test_arms_agree_and_the_protein_alone_is_scored_in_full(run, e1, family, tmp_path):
    out = tmp_path / "scores.csv"
    assert run("--homologs", family, "--arm", "full", "frozen", "--out", out, "--method", "wild_type").code == 0
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 19 * len(PROTEIN)
    assert [float(row["full"]) for row in rows] == pytest.approx([float(row["frozen"]) for row in rows], abs=1e-4)
    assert run("--out", out).code == 0
    alone = [float(row["full"]) for row in csv.DictReader(out.open())]
    assert alone == pytest.approx(e1.score_variants(PROTEIN).values, abs=1e-5)


def test_a_frozen_protein_is_recorded_and_the_full_arm_stays_exact(run, e1, family, write, tmp_path):
    table, out, found = write("variants.csv", "mutant\nM1A\nV5A\n"), tmp_path / "scores.csv", tmp_path / "scores.json"
    exact = ("--homologs", family, "--arm", "full", "frozen", "--refresh", 2)
    assert run(table, *exact, "--out", out).code == 0
    before = out.read_text()
    assert run(table, *exact, "--freeze-query", "--out", out, "--json", found).code == 0
    context = read_homologs(family, PROTEIN).sample(seed=0)
    given = {"arm": "frozen", "context": context, "freeze_query": True, "refresh": 2}
    expected = e1.score_variants(PROTEIN, ["M1A", "V5A"], **given)
    rows, run_before = list(csv.DictReader(out.open())), list(csv.DictReader(before.splitlines()))
    assert [float(row["frozen"]) for row in rows] == pytest.approx(expected.values, abs=1e-5)
    assert [row["full"] for row in rows] == [row["full"] for row in run_before]
    assert [row["frozen"] for row in rows] != [row["frozen"] for row in run_before]
    result = json.loads(found.read_text())
    assert result["run"]["homologs"]["freeze_query"] is True
    assert {arm: one["refresh"] for arm, one in result["results"][0]["arms"].items()} == {"full": 0, "frozen": 2}


def test_drawn_contexts_are_stored_as_variants_and_a_service_find_them(esm, e1, family, write, tmp_path):
    protein, folder = write("protein.fasta", f">wt\n{PROTEIN}\n"), tmp_path / "contexts"
    options = ("--homologs", family, "--context-tokens", 40, 80, "--seed", 3, "--model", E1_MINI, "--preset", "exact")
    stored = esm("store", protein, folder, *options, "--json", tmp_path / "stored.json")
    assert (stored.code, stored.err) == (0, f"esm-turbo: {family}: 2 contexts of 2 to 4 of 4 homologs\n")
    contexts = read_homologs(family, PROTEIN).sample_several((40, 80), seed=3)
    ids = [context_key(e1, one.sequence) for one in contexts]
    assert stored.out.startswith("2 contexts computed; ") and stored.out.splitlines()[1:] == ids
    found = json.loads((tmp_path / "stored.json").read_text())
    assert (found["ids"], found["computed"], found["failed"]) == (ids, 2, [])
    assert found["run"]["homologs"]["contexts"] == [one.to_dict() for one in contexts]
    scored = esm("variants", protein, *options, "--store", folder, "--method", "wild_type")
    assert scored.err.endswith(f"{folder}: 2 contexts found, 0 computed and added\n")
    again = esm("store", protein, folder, *options)
    assert again.out.startswith("0 contexts computed; ") and again.out.splitlines()[1:] == ids


def test_the_map_of_variants_is_drawn(run, family, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "map.svg"
    assert run("--homologs", family, "--plot", picture, "--method", "wild_type").code == 0
    # Lines of a caption break between words.
    assert "wild-type marginals after 1 context of" in picture.read_text()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (FAMILY.replace("VVVVTGVPGVGGTT", "VVVVTGVPGVGGTA"), (), "record 'wt': .* not of wt: residue 18 is A, not T"),
        (FAMILY.replace("MKIGIV", "MKJGIV"), (), "record 'b': position 5 is 'J'.*--unknown X"),
        (FAMILY, ("--context-tokens", 10), "no homolog fits into 10 tokens; the shortest, 'b', has 16 residues"),
        pytest.param(
            FAMILY.replace("MRHpf", "MRH" + "p" * 8192),
            ("--context-tokens", 10000),
            "record 'c': 8,210 residues are too many; the model reads at most 8,192",
            id="too long",
        ),
        pytest.param(
            FAMILY + "".join(f">long{n}\nA{PROTEIN[1:-1]}{'p' * 8100}T\n" for n in range(9)),
            ("--context-tokens", 80000),
            "context 1: .* positions are too many; the model reads at most 65,536",
            id="too many positions",
        ),
        (FAMILY, ("--max-similarity", 0.2), "at most 20% of the protein's residues; raise --max-similarity"),
        (FAMILY, ("--max-similarity", 95), "--max-similarity must be a share from 0 to 1, got 95"),
        (FAMILY, ("--seed", -1), "--seed must be an integer of at least 0"),
    ],
)
def test_bad_families_end_the_run_before_it_begins(run, esm, write, tmp_path, text, options, message):
    family, out, folder = write("family.a3m", text), tmp_path / "out.csv", tmp_path / "contexts"
    for code, printed, err in (
        run("--homologs", family, *options, "--out", out),
        esm("store", write("protein.fasta", f">wt\n{PROTEIN}\n"), folder, "--homologs", family, *options),
    ):
        assert (code, printed) == (2, "") and not out.exists() and not folder.exists()
        assert re.search(message, err), err


def test_what_has_no_use_is_refused(run, esm, family, write):
    missing = Path("missing.a3m")
    assert "there is no such file" in run("--homologs", missing).error
    assert "are for --homologs; name the family" in run("--seed", 3).error
    assert "are for --homologs; name the family" in run("--freeze-query").error
    frozen = ("--homologs", family, "--freeze-query")
    for options in (("--arm", "full"), ("--method", "wild_type")):
        assert "it needs another arm than full and another method than wild_type" in run(*frozen, *options).err
    assert "arm 'frozen' stores homologs, and there are none" in run("--arm", "frozen").err
    several = write("several.fasta", f">wt\n{PROTEIN}\n>other\nMKT\n")
    assert esm("variants", several, "--homologs", family).error.endswith("is the family of one protein; there are 2")
    assert run("--homologs", family, "--out", family).code == 2


def test_other_families_read_no_homologs(esm_shared, family, write):
    found = esm_shared("variants", write("protein.fasta", f">wt\n{PROTEIN}\n"), "--homologs", family)
    assert found.code == 2
    assert "ESM-2 reads one protein at a time and no homologs; name a checkpoint of E1 with --model" in found.err
