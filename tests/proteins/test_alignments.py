"""Families of homologs from files, and contexts that are drawn from them."""

from __future__ import annotations

import gzip
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo import read_fasta, read_homologs
from esm_turbo.proteins import alignments
from esm_turbo.proteins.alignments import HomologFamily, UnrelatedHomologsWarning
from esm_turbo.proteins.fasta import FastaError, ProteinRecord

# Archaeal adenylate kinases of UniProt and the PDB, which e1-mini has not seen.
EXAMPLES = Path(__file__).parents[2] / "examples" / "e1"
PROTEIN = "MKTAYIAKQR"
# Lower case and dots stand between the columns.
A3M = f">query\n{PROTEIN}\n>one some words\nMKT--IAKQK\n>two\nMRTaayAYIS-QR..\n>one\n-KTAYIAKQRgs\n"

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


@pytest.fixture(scope="module")
def family() -> HomologFamily:
    [[protein], _] = read_fasta(EXAMPLES / "protein.fasta")
    return read_homologs(EXAMPLES / "family.a3m", protein)


@pytest.mark.parametrize("name", ["family.a3m", "family.A3M", "family.a2m", "family.a3m.gz"])
@pytest.mark.parametrize(
    "text",
    [
        A3M,
        "#10\t1\n" + A3M,
        A3M.replace("\n", "\r\n"),
        A3M + "\0",
    ],
)
def test_alignments_keep_insertions_in_homologs_and_leave_them_out_of_columns(
    write: Write, name: str, text: str
) -> None:
    found = read_homologs(write(name, text), PROTEIN)
    assert found.ids == ("query", "one", "two", "one")
    assert found.sequences == (PROTEIN, "MKTIAKQK", "MRTAAYAYISQR", "KTAYIAKQRGS")
    rows = [row.tobytes().decode() for row in found.rows]
    assert rows == [PROTEIN, "MKT--IAKQK", "MRTAYIS-QR", "-KTAYIAKQR"]
    np.testing.assert_allclose(found.similarity, [1, 0.7, 0.7, 0.9])
    # Of the residues of the others, the query has 7 of 8, 7 of 9 and 9 of 9, and the last 9 of 10, 6 of 8 and 6 of 9.
    assert found.neighbours.tolist() == [3, 1, 1, 2]
    # The protein is none of its homologs.
    assert repr(found) == f"HomologFamily({name}, 3 homologs, 10 columns)" and len(found) == 3


def test_alignments_of_one_protein_may_follow_each_other(write: Write) -> None:
    """Of two databases, in MMseqs2's format; the second begins with the protein, too."""
    found = read_homologs(write("f.a3m", A3M.replace(">two", f"\0>query\n{PROTEIN}\n>two") + "\0"), PROTEIN)
    assert found.ids == ("query", "one", "query", "two", "one") and len(found) == 3


@pytest.mark.parametrize("name", ["family.fasta", "family.fa.gz"])
def test_sequences_are_aligned_with_the_protein(write: Write, name: str) -> None:
    """Whether they have gaps or not, in either case; the protein need not be among them."""
    text = ">a\nmktayiakqr\n>b x\nMKTA--AKQR\n>a\nGSMKTAYIAKQRU\n"
    found = read_homologs(write(name, text), ProteinRecord("p", PROTEIN))
    assert found.sequences == (PROTEIN, "MKTAAKQR", f"GS{PROTEIN}U")
    rows = [row.tobytes().decode() for row in found.rows]
    assert (rows[0], rows[2]) == (PROTEIN, PROTEIN) and rows[1].replace("-", "") == "MKTAAKQR"


def test_sequences_of_another_family_are_noticed(write: Write, family: HomologFamily) -> None:
    [[protein], _] = read_fasta(EXAMPLES / "protein.fasta")
    text = "".join(f">{number}\n{one}\n" for number, one in enumerate(family.sequences[6:]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        similar = read_homologs(write("own.fasta", text), protein).similarity
    # Those of the file, aligned in another way.
    assert np.abs(similar - family.similarity[6:]).max() < 0.05
    backwards = "".join(f">{number}\n{one[::-1]}\n" for number, one in enumerate(family.sequences))
    with pytest.warns(
        UnrelatedHomologsWarning, match=r"other.fasta: no sequence aligns with adenylate_kinase much better"
    ):
        read_homologs(write("other.fasta", backwards), protein)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.a3m", "", "f.a3m: is empty; give at least one protein"),
        ("f.a3m", f">q\n{PROTEIN}\n", "f.a3m: holds the protein alone; a family needs at least one homolog"),
        ("f.fasta", f">q\n{PROTEIN}\n>r\n{PROTEIN}\n", "f.fasta: holds the protein alone"),
        ("f.a3m", A3M.replace("MKTAYI", "MKTAYL"), "record 'query': the alignment is .*: residue 6 is L, not I"),
        ("f.a2m", f">q\n{PROTEIN.lower()}\n>r\nmkt\n", "record 'q': is all lower case, which stands between columns"),
        ("f.a3m", ">q\nMKTAYIAKQ\n>r\nMKTAYIAKQ\n", "record 'q': .*it has 9 residues, not 10"),
        ("f.a3m", A3M.replace("MKT--IAKQK", "MKT--IAKQ"), "record 'one': has 9 columns, and the first record 10"),
        (
            "f.a3m",
            f"{A3M}\0{A3M.replace('MKTAYI', 'MKTAYL')}\0",
            "f.a3m: holds the alignment of another protein from line 9, after a zero byte",
        ),
        ("f.a3m", f"{A3M}\0>of another\nMKTAYLAKQR\n\0", "f.a3m: holds .* another protein from line 9"),
        ("f.a3m", A3M + ">r\nMLLNPPWFYWW\n", "record 'r': has 11 .* if it is from the alignment of another protein"),
        ("f.a3m", f">r\nMLLNPPWFYWW\n{A3M}", "record 'r': the alignment is of this protein, not of the protein"),
        ("f.a3m", A3M.replace("MKT--I", "MKJ--I"), "record 'one': position 3 is 'J', not one of the 25 residue codes"),
        ("f.a3m", A3M.replace("MKT--I", "MK?--I"), "record 'one': position 3 is '\\?'"),
        ("f.a3m", A3M.replace("MKT--I", "MK,--I"), "record 'one': position 3 is ','"),
        ("f.a3m", A3M + ">gaps\n----------\n", "record 'gaps': holds no residues"),
        ("f.fasta", f">a\n{PROTEIN}\n>b\n\n>c\nM1\n", r"record 'b': holds no residues.*\(and 1 more bad record\)"),
        ("f.fasta", PROTEIN, "is not FASTA"),
        ("f.a3m", A3M.replace("MKT--I", "MK\0--I"), "is not text"),
        ("f.gz", "", "is empty"),
    ],
)  # fmt: skip
def test_bad_families_are_refused(write: Write, name: str, text: str, message: str) -> None:
    with pytest.raises(FastaError, match=message):
        read_homologs(write(name, text), PROTEIN)


def test_other_bad_files(write: Write, tmp_path: Path) -> None:
    with pytest.raises(FastaError, match="there is no such file"):
        read_homologs(tmp_path / "none.a3m", PROTEIN)
    with pytest.raises(FastaError, match="is a folder"):
        read_homologs(tmp_path, PROTEIN)
    cut = write("cut.a3m.gz", A3M * 50)
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(FastaError, match="truncated or damaged"):
        read_homologs(cut, PROTEIN)
    with pytest.raises(ValueError, match="the protein: position 2 is '1'"):
        read_homologs(write("f.a3m", A3M), "M1")
    with pytest.raises(TypeError, match="the protein: a sequence must be a string, got list"):
        read_homologs(write("f.a3m", A3M), ["M"])  # type: ignore[arg-type]
    assert (
        read_homologs(write("f.a3m", A3M.replace("MKT--I", "MKJ--I")), PROTEIN, unknown="X").sequences[1] == "MKXIAKQK"
    )


@pytest.mark.parametrize(
    ("seed", "tokens", "most", "drawn"),
    [
        (0, 600, 511, "6 4 kinase"),
        (1, 600, 511, "6 8 1"),
        (2, 1200, 511, "4 5 7 0 6 1"),
        (7, 7168, 3, "6 8 7"),
        (11, 7168, 511, "0 6 kinase 1 8 7 5 3 4"),
    ],
)
def test_draws_are_those_of_the_reference_sampler(
    family: HomologFamily, seed: int, tokens: int, most: int, drawn: str
) -> None:
    """What `sample_context` of E1 (commit 219c7c7) draws from the file."""
    found = family.sample(tokens, max_similarity=1.0, max_homologs=most, seed=seed)
    assert [one.rpartition("_")[2] for one in found.ids] == drawn.split()


@given(
    tokens=st.integers(210, 2500),
    cap=st.floats(0.45, 1),
    seed=st.integers(0, 2**40),
    most=st.integers(1, 12),
)
def test_draws_keep_their_limits(family: HomologFamily, tokens: int, cap: float, seed: int, most: int) -> None:
    found = family.sample(tokens, max_similarity=cap, min_similarity=0.41, max_homologs=most, seed=seed)
    assert found == family.sample(tokens, max_similarity=cap, min_similarity=0.41, max_homologs=most, seed=seed)
    assert 1 <= len(found.ids) <= most and len(set(found.ids)) == len(found.ids)
    numbers = [family.ids.index(one) for one in found.ids]
    assert found.sequence == ",".join(family.sequences[one] for one in numbers)
    assert len(found.sequence) - len(numbers) + 1 <= tokens
    assert all(0.41 <= family.similarity[one] <= cap for one in numbers)
    assert found.to_dict() == {
        "ids": list(found.ids), "seed": seed, "tokens": tokens, "max_similarity": cap, "min_similarity": 0.41,
        "max_homologs": most,
    }  # fmt: skip


@given(
    rows=st.lists(st.text("AC-", min_size=10, max_size=10), min_size=1, max_size=8),
    block=st.integers(1, 9),
)
def test_neighbours_are_those_of_a_plain_loop(rows: list[str], block: int) -> None:
    codes = np.array([list(row.encode()) for row in rows], dtype=np.uint8)
    family = HomologFamily("it", ("",) * len(rows), ("",) * len(rows), codes, codes[0])
    expected = []
    for own in rows:
        equal = [sum(a == b != "-" for a, b in zip(own, other, strict=True)) for other in rows]
        sizes = [max(1, len(other.replace("-", ""))) for other in rows]
        expected.append(max(1, sum(count / size >= 0.8 for count, size in zip(equal, sizes, strict=True))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignments, "_BLOCK", block)
        assert family.neighbours.tolist() == expected


def test_relatives_count_as_one(write: Write) -> None:
    """Twenty copies of one homolog are drawn as often as a single other one."""
    copies = "".join(f">copy{number}\nMKTGGGGGGG\n" for number in range(20))
    family = read_homologs(write("f.a3m", f">query\n{PROTEIN}\n{copies}>other\nMKTSSSSSSS\n"), PROTEIN)
    assert family.neighbours.tolist() == [1, *[20] * 20, 1]
    first = [family.sample(10, seed=seed).ids for seed in range(400)]
    # Of 400 fair draws, all but one in 10,000 times.
    assert 160 < sum(ids == ("other",) for ids in first) < 240


def test_contexts_for_every_budget_with_every_cap(family: HomologFamily) -> None:
    found = family.sample_several((400, 800), max_similarity=(0.9, 0.5), seed=5)
    assert [(one.tokens, one.max_similarity, one.seed) for one in found] == [
        (400, 0.9, 5), (400, 0.5, 6), (800, 0.9, 7), (800, 0.5, 8),
    ]  # fmt: skip
    assert found[2] == family.sample(800, max_similarity=0.9, seed=7)
    assert "2 homologs" in repr(found[0]) and "seed=5" in repr(found[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 100}, "no homolog fits into 100 tokens; the shortest, .*, has 192 residues"),
        ({"tokens": 0}, "`tokens` must be an integer of at least 1, got 0"),
        ({"tokens": 7.5}, "`tokens` must be an integer"),
        ({"max_homologs": 0}, "`max_homologs` must be an integer of at least 1"),
        ({"seed": -1}, "`seed` must be an integer of at least 0"),
        ({"max_similarity": 95}, "`max_similarity` must be a share from 0 to 1, got 95"),
        ({"min_similarity": 0.96}, "`min_similarity` must lie in 0 to `max_similarity`, 0.95, got 0.96"),
        ({"max_similarity": float("nan")}, "`max_similarity` must be a share from 0 to 1"),
        (
            {"max_similarity": 0.3},
            r"at most 30% of the protein's residues; raise `max_similarity` \(they have 41% to 100%\)",
        ),
        ({"min_similarity": 0.999, "max_similarity": 0.999}, "100% to 100% .*; lower `min_similarity`"),
    ],
)
def test_bad_options_are_refused(family: HomologFamily, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.sample(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rows", "protein", "similarity", "neighbours"])
def test_arrays_that_samples_are_drawn_by_cannot_be_written(family: HomologFamily, name: str) -> None:
    for one in (family, pickle.loads(pickle.dumps(family))):
        with pytest.raises(ValueError, match="read-only"):
            getattr(one, name).sort()
