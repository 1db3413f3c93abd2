"""The shipped calibration and evaluation proteins, from their files alone, and the script that chose them."""

import csv
import gzip
import hashlib
import importlib.util
import itertools
import random
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from esm_turbo.proteins.fasta import read_fasta_strict

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "calibration_data"
EVALUATION = DATA / "evaluation"
STRUCTURAL = ("mainly_alpha", "mainly_beta", "alpha_beta", "little_structure")
CLASSES = {*STRUCTURAL, "transmembrane", "disordered"}
LENGTH_BIN_ENDS = (150, 350, 700, 860, 1022)
LICENCES = {"PDB": "CC0-1.0", "RefSeq": "public domain", "UniProtKB/Swiss-Prot": "CC-BY-4.0"}
# TEM-1 beta-lactamase without its signal peptide, UniProt P62593: the target of variant-effect evaluation.
BLAT_ECOLX = (
    "HPETLVKVKDAEDQLGARVGYIELDLNSGKILESFRPEERFPMMSTFKVLLCGAVLSRVDAGQEQLGRRIHYSQNDLVEYSPVTEKHLTDGMTVRELCSAAITMSD"
    "NTAANLLLTTIGGPKELTAFLHNMGDHVTRLDRWEPELNEAIPNDERDTTMPAAMATTLRKLLTGELLTLASRQQLIDWMEADKVAGPLLRSALPAGWFIADKSGA"
    "GERGSRGIIAALGPDGKPSRIVVIYTTGSQATMDERNRQIAEIGASLIKHW"
)


def kmers(sequence):
    return {sequence[start : start + 10] for start in range(len(sequence) - 9)}


def length_bin(length):
    return next(index for index, end in enumerate(LENGTH_BIN_ENDS) if length <= end)


def share_past(lengths, position):
    return sum(max(0, length - position) for length in lengths) / sum(lengths)


@pytest.fixture(scope="module")
def proteins():
    return read_fasta_strict(DATA / "proteins.fasta")


@pytest.fixture(scope="module")
def manifest():
    with (DATA / "manifest.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.fixture(scope="module")
def script():
    name = "select_calibration_proteins"
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


# The proteins


def test_headers_hold_an_identifier_and_a_class(proteins):
    for record in proteins:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", record.id)
        assert record.description == f"class={record.structural_class}"
    assert {record.structural_class for record in proteins} == CLASSES


def test_sequences_are_standard_distinct_and_of_the_stated_lengths(proteins):
    assert len(proteins) >= 600
    assert len({record.sequence for record in proteins}) == len(proteins)
    for record in proteins:
        assert 30 <= len(record.sequence) <= 1022, record.id
        assert set(record.sequence) <= set("ACDEFGHIKLMNPQRSTVWY"), record.id
    assert sum(len(record.sequence) for record in proteins) <= 200_000


def test_classes_are_balanced_with_membrane_and_disordered_over_represented(proteins):
    counts = Counter(record.structural_class for record in proteins)
    structural = [counts[name] for name in STRUCTURAL]
    assert max(structural) <= 1.1 * min(structural)
    assert min(counts["transmembrane"], counts["disordered"]) > max(structural)


def test_positions_are_covered_to_the_end(proteins):
    lengths = [len(record.sequence) for record in proteins]
    assert share_past(lengths, 350) >= 0.15
    assert share_past(lengths, 700) >= 0.05
    for start, end in itertools.pairwise((0, *LENGTH_BIN_ENDS)):
        assert sum(start < length <= end for length in lengths) >= 20
    assert sum(length >= 1000 for length in lengths) >= 5
    for name in CLASSES:
        assert sum(len(r.sequence) > 700 for r in proteins if r.structural_class == name) >= 3, name


def test_every_beginning_from_40_on_is_balanced(proteins):
    total: Counter = Counter()
    for record in proteins:
        total.update((record.structural_class, length_bin(len(record.sequence))))
    so_far: Counter = Counter()
    lengths = []
    for count, record in enumerate(proteins, start=1):
        so_far.update((record.structural_class, length_bin(len(record.sequence))))
        lengths.append(len(record.sequence))
        if count >= 40:
            for key in total:
                assert abs(so_far[key] - count * total[key] / len(proteins)) <= 2, (count, key)
            assert share_past(lengths, 350) >= 0.15, count
            assert share_past(lengths, 700) >= 0.05, count


def test_no_two_proteins_share_more_than_two_10_mers(proteins):
    holders = defaultdict(list)
    for index, record in enumerate(proteins):
        for kmer in kmers(record.sequence):
            holders[kmer].append(index)
    shared = Counter(pair for indices in holders.values() for pair in itertools.combinations(indices, 2))
    assert max(shared.values(), default=0) <= 2


def test_proteins_are_disjoint_from_the_evaluation_sets(proteins):
    held_out = kmers(BLAT_ECOLX)
    for name in ("cath_val200.fasta", "paper_six.fasta"):
        for record in read_fasta_strict(EVALUATION / name):
            held_out |= kmers(record.sequence)
    assert len(held_out) > 25_000
    assert max(len(kmers(record.sequence) & held_out) for record in proteins) <= 2


def test_long_proteins_are_disjoint_from_calibration(proteins):
    long_proteins = read_fasta_strict(EVALUATION / "long_human.fasta")
    calibration = set().union(*(kmers(record.sequence) for record in proteins))
    assert len(long_proteins) == 12
    for record in long_proteins:
        assert 600 <= len(record.sequence) <= 1022
        assert len(kmers(record.sequence) & calibration) <= 2


# Manifest and READMEs


def test_manifest_describes_every_protein_in_order(proteins, manifest):
    assert [row["id"] for row in manifest] == [record.id for record in proteins]
    for record, row in zip(proteins, manifest, strict=True):
        assert row["class"] == record.structural_class
        assert int(row["length"]) == len(record.sequence)
        assert row["sha256"] == hashlib.sha256(record.sequence.encode()).hexdigest()
        assert row["licence"] == LICENCES[row["source"].partition(" (")[0]]
        assert re.fullmatch(r"[a-z0-9_]+\.(fasta|tsv)\.gz", row["source_file"])


def test_manifest_evidence_supports_the_class(proteins, manifest, script):
    rounding = 5e-5
    for record, row in zip(proteins, manifest, strict=True):
        segments, distance = int(row["tm_segments"]), float(row["charge_hydropathy"])
        assert segments == script.transmembrane_segments(record.sequence)
        assert row["charge_hydropathy"] == f"{script.charge_hydropathy(record.sequence):.4f}"
        assert (segments >= 3) == (row["class"] == "transmembrane")
        if row["class"] == "disordered":
            assert segments == 0
            assert distance > -rounding
            assert row["source"] in ("RefSeq (human)", "UniProtKB/Swiss-Prot (viruses)")
        if row["class"] in STRUCTURAL:
            assert row["source"] == "PDB"
            helix, strand = float(row["helix"]), float(row["strand"])
            if row["class"] == "little_structure":
                assert helix + strand < 0.30 + 2 * rounding
            else:
                assert helix + strand >= 0.30 - 2 * rounding
                assert (strand < 0.10) == (row["class"] == "mainly_alpha")
                assert (helix < 0.15 and strand >= 0.10) == (row["class"] == "mainly_beta")


def test_readme_states_the_numbers(proteins, manifest):
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    for name in (*CLASSES, "all"):
        lengths = [len(r.sequence) for r in proteins if name in ("all", r.structural_class)]
        bins = Counter(map(length_bin, lengths))
        cells = [name, *(bins[index] for index in range(5)), len(lengths), f"{sum(lengths):,}"]
        assert f"| {' | '.join(map(str, cells))} |" in readme
    lengths = [len(record.sequence) for record in proteins]
    assert f"past position 350: {share_past(lengths, 350):.1%}" in readme
    assert f"past position 700: {share_past(lengths, 700):.1%}" in readme
    for source, count in Counter(row["source"] for row in manifest).items():
        assert f"| {source} | {count} |" in readme
    for name in {row["source_file"] for row in manifest}:
        assert re.search(rf"\| `{re.escape(name)}` \| `[0-9a-f]{{64}}` \|", readme)


@pytest.mark.parametrize("folder", [DATA, EVALUATION], ids=["calibration", "evaluation"])
def test_readme_names_every_file_and_its_licence(folder):
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.iterdir():
        if path.name != "README.md":
            assert f"`{path.name}{'/' if path.is_dir() else ''}`" in readme
    assert "CC BY 4.0" in readme


# Evaluation proteins


def test_cath_domains_carry_their_class():
    records = read_fasta_strict(EVALUATION / "cath_val200.fasta")
    assert len(records) == 200
    classes = Counter(record.structural_class for record in records)
    assert set(classes) == set(STRUCTURAL)
    for record in records:
        assert re.fullmatch(r"[1-4](\.\d+){3}", record.description)


def test_the_six_proteins_of_the_paper():
    records = read_fasta_strict(EVALUATION / "paper_six.fasta")
    assert {record.id: len(record.sequence) for record in records} == {
        "insulin_B_chain": 30,
        "hemoglobin_alpha": 141,
        "TM_helix": 37,
        "polyAG": 36,
        "serine_protease_fragment": 49,
        "FUS_IDR": 163,
    }


# The script


@pytest.mark.parametrize(
    ("ss3", "expected"),
    [
        ("C" * 10, "little_structure"),
        ("H" * 29 + "C" * 71, "little_structure"),
        ("H" * 30 + "C" * 70, "mainly_alpha"),
        ("H" * 40 + "E" * 9 + "C" * 51, "mainly_alpha"),
        ("H" * 40 + "E" * 10 + "C" * 50, "alpha_beta"),
        ("H" * 15 + "E" * 30 + "C" * 55, "alpha_beta"),
        ("H" * 14 + "E" * 30 + "C" * 56, "mainly_beta"),
        ("E" * 30 + "C" * 70, "mainly_beta"),
        ("H" * 10 + "E" * 19 + "C" * 71, "little_structure"),
    ],
)
def test_structural_class_of_ss3(script, ss3, expected):
    assert script.structural_class_of_ss3(ss3) == expected


TARGETS = {"mainly_alpha": (4, 2), "disordered": (3, 3)}


@pytest.fixture
def pool(script):
    """Random candidates of two classes and two length bins, ten of each, and a near copy of each."""
    generator = random.Random(0)
    candidates = []
    for name, (low, high), number in itertools.product(TARGETS, ((30, 150), (151, 350)), range(10)):
        sequence = "".join(generator.choices("ACDEFGHIKLMNPQRSTVWY", k=generator.randint(low, high - 1)))
        for suffix, tail in (("", ""), ("_copy", "A")):
            identifier = f"{name}_{low}_{number}{suffix}"
            candidates.append(
                script.Candidate(identifier, sequence + tail, name, "PDB", "x", "CC0-1.0", 0.0, 0.0, 0, 0.0)
            )
    return candidates


def test_select_meets_its_targets_without_near_copies(script, pool):
    chosen = script.select(pool, [], TARGETS, seed=1)
    assert Counter(candidate.stratum for candidate in chosen) == {
        ("mainly_alpha", 0): 4,
        ("mainly_alpha", 1): 2,
        ("disordered", 0): 3,
        ("disordered", 1): 3,
    }
    assert len({candidate.id.removesuffix("_copy") for candidate in chosen}) == 12


def test_select_depends_on_seed_and_content_but_not_on_order(script, pool):
    chosen = script.select(pool, [], TARGETS, seed=1)
    assert script.select(pool[::-1], [], TARGETS, seed=1) == chosen
    assert script.select(pool, [], TARGETS, seed=2) != chosen


def test_select_leaves_out_relatives_of_held_out_proteins(script, pool):
    taken = script.select(pool, [], TARGETS)[0].sequence
    assert all(kmers(taken).isdisjoint(kmers(c.sequence)) for c in script.select(pool, [taken], TARGETS))
    # Two 10-mers in common are allowed, three are not.
    with_two, with_three = taken[:11], taken[:12]
    assert script.select(pool, [with_two], TARGETS)[0].sequence == taken
    assert script.select(pool, [with_three], TARGETS)[0].sequence != taken


def test_select_says_what_is_missing(script, pool):
    with pytest.raises(
        ValueError, match=r"^mainly_alpha, 151 to 350 residues: 10 distinct proteins for 11; lower the target"
    ):
        script.select(pool, [], {"mainly_alpha": (1, 11)})


def test_script_runs_on_a_folder_and_repeats_itself(script, pool, tmp_path, monkeypatch, capsys):
    sources = tmp_path / "sources"
    sources.mkdir()
    alpha = [candidate for candidate in pool if candidate.structural_class == "mainly_alpha"]
    rows = [f"{c.id}\t{c.sequence}\t{'H' * len(c.sequence)}" for c in alpha]
    with gzip.open(sources / script.PDB_FILE, "wt") as file:
        file.write("\n".join(["chain\tsequence\tss3", *rows, "odd\tMKJT\tCCCC"]) + "\n")
    unfolded = "EEDSKEEGQ" * 5
    for name, header in (
        (script.REFSEQ_FILE, "NP_1.1"),
        (script.UNIPROT_FILE, "P00001 Some protein [Archaea]"),
    ):
        with gzip.open(sources / name, "wt") as file:
            file.write(f">{header}\n{unfolded}\n")
    for name in script.HELD_OUT_FASTA:
        (sources / name).write_text(f">held_out\n{BLAT_ECOLX}\n")
    (sources / script.HELD_OUT_PEPTIDES).write_text("Sequence,Receptor Sequence\nMKT,MKTAYIAKQR\n")
    (sources / script.HELD_OUT_MUTANTS).write_text("mutant,fitness\nP25A,0\nH24C,0\n")
    # The archaeal protein is as unfolded as the human one and is left out all the same.
    monkeypatch.setattr(script, "TARGETS", {"mainly_alpha": (4, 2), "disordered": (1, 0)})

    out = tmp_path / "out"
    assert script.main([str(sources), "--out", str(out)]) == 0
    records = read_fasta_strict(out / "proteins.fasta")
    assert Counter(record.structural_class for record in records) == {"mainly_alpha": 6, "disordered": 1}
    assert [record.id for record in records if record.structural_class == "disordered"] == ["NP_1.1"]
    assert list(script.held_out_sequences(sources))[-1] == "HP"
    assert "| all | 5 | 2 | 0 | 0 | 0 | 7 |" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"proteins.fasta", "manifest.tsv", "README.md"}
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert script.main([str(sources), "--out", str(out)]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written


def test_script_refuses_a_missing_folder_and_writes_nothing(script, tmp_path, capsys):
    assert script.main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
