"""Reading and checking FASTA files, and batching by token budget."""

import gzip
import pickle
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.proteins.batches import token_batches
from esm_turbo.proteins.fasta import (
    RESIDUES,
    BadRecord,
    FastaError,
    ProteinRecord,
    normalize_sequence,
    read_fasta,
    read_fasta_strict,
    sha256_file,
)


@pytest.fixture
def write(tmp_path):
    """Write bytes or text to a new file and return its path."""

    def _write(content, name="proteins.fasta"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return _write


def one_line_error(path, **options):
    with pytest.raises(FastaError) as caught:
        read_fasta(path, **options)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert "; " in message, "says what to do after the semicolon"
    assert [problem.record for problem in caught.value.problems] == [""]
    return message


# Residues


def test_normalize_sequence_accepts_case_whitespace_and_one_trailing_stop():
    assert normalize_sequence(" mk t\tA\r\nyIa*\n", name="p") == "MKTAYIA"
    assert normalize_sequence(RESIDUES.lower(), name="p") == RESIDUES


BY_X = "correct it, or replace it with X (--unknown X, in Python unknown='X')"
BY_REMOVAL = "remove gaps (--remove-gaps, in Python remove_gaps=True)"


@pytest.mark.parametrize(
    ("sequence", "position", "character", "remedy", "unknown", "remove_gaps"),
    [
        ("MKJ", 3, "'J'", BY_X, "MKX", None),
        ("mkj", 3, "'J'", BY_X, "MKX", None),
        ("MK?T", 3, "'?'", BY_X, "MKXT", None),
        ("MKß", 3, r"'\xdf'", "correct or remove it", "MKX", None),
        ("M\u0131", 2, r"'\u0131'", "correct or remove it", "MX", None),
        ("\u041cK", 1, r"'\u041c'", "correct or remove it", "XK", None),
        ("M K\nT-A", 4, "'-'", BY_REMOVAL, None, "MKTA"),
        (".MK", 1, "'.'", BY_REMOVAL, None, "MK"),
        ("MK~", 3, "'~'", BY_REMOVAL, None, "MK"),
        ("MK1T", 3, "'1'", "remove numbers from the sequence", None, None),
        ("MK<mask>T", 3, "'<'", "correct or remove it", None, None),
        ("MK>T", 3, "'>'", "correct or remove it", None, None),
        ("MK\u200bT", 3, r"'\u200b'", "correct or remove it", None, None),
        ("MK\x1bT", 3, r"'\x1b'", "correct or remove it", None, None),
    ],
    ids=ascii,
)
def test_other_characters_are_refused_with_a_remedy_that_works(
    sequence, position, character, remedy, unknown, remove_gaps
):
    message = rf"^P01308: position {position} is {re.escape(character)}, not one of .*; {re.escape(remedy)}$"
    for options, expected in (({}, None), ({"unknown": "X"}, unknown), ({"remove_gaps": True}, remove_gaps)):
        if expected is None:
            with pytest.raises(ValueError, match=message):
                normalize_sequence(sequence, name="P01308", **options)
        else:
            assert normalize_sequence(sequence, name="P01308", **options) == expected


def test_gaps_are_removed_on_request_and_never_become_residues():
    aligned = "-MKTAYI--QR.~*--"
    assert normalize_sequence(aligned, name="p", remove_gaps=True) == "MKTAYIQR"
    assert normalize_sequence("MJ-T", name="p", remove_gaps=True, unknown="X") == "MXT"
    with pytest.raises(ValueError, match=r"position 7 is '-'.*--remove-gaps"):
        normalize_sequence("MKTAYI--QR", name="p", unknown="X")
    # Positions are those of the given text.
    with pytest.raises(ValueError, match="position 4 is 'J'"):
        normalize_sequence("M--J", name="p", remove_gaps=True)
    with pytest.raises(ValueError, match="holds no residues"):
        normalize_sequence("-.-", name="p", remove_gaps=True)


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        *((text, r"position 3 is a stop '\*' inside .*; cut it there or remove") for text in ("MK*T", "MK*T*")),
        ("*MK", "position 1 is a stop"),
        ("MKT**", "position 4 is a stop"),
        *((text, "holds no residues; ") for text in ("", " \t\r\n", "*", " * ")),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("unknown", [None, "X"])
def test_an_internal_stop_and_an_empty_sequence_are_never_accepted(sequence, reason, unknown):
    with pytest.raises(ValueError, match=f"^p: {reason}"):
        normalize_sequence(sequence, name="p", unknown=unknown)


@pytest.mark.parametrize("sequence", [None, b"MKT", 7, ["M", "K"]])
def test_a_sequence_must_be_a_string(sequence):
    with pytest.raises(TypeError, match=f"^p: a sequence must be a string, got {type(sequence).__name__}$"):
        normalize_sequence(sequence, name="p")


@pytest.mark.parametrize("unknown", ["", "A", "XX", "*", "-", 1])
def test_unknown_is_none_or_x(write, unknown):
    with pytest.raises(ValueError, match="`unknown` must be None or 'X', got "):
        normalize_sequence("MKT", name="p", unknown=unknown)
    with pytest.raises(ValueError, match="`unknown` must be None or 'X', got "):
        read_fasta(write(">a\nMKT\n"), unknown=unknown)


def test_unknown_keeps_the_length_and_every_residue_code():
    assert normalize_sequence("MKJJ?BZUOXé", name="p", unknown="x") == "MKXXXBZUOXX"
    for text, position in (("MK1J", 3), ("MKJ_T", 4), ("MK7", 3), ("MK/", 3), ("M²", 2)):
        with pytest.raises(ValueError, match=f"p: position {position} is "):
            normalize_sequence(text, name="p", unknown="X")


@given(st.text(max_size=40))
def test_normalized_text_is_valid_and_stable_or_refused(text):
    try:
        strict = normalize_sequence(text, name="p")
    except ValueError as error:
        assert str(error).startswith("p: ")
        assert "\n" not in str(error)
    else:
        assert strict
        assert set(strict) <= set(RESIDUES)
        assert strict == normalize_sequence(strict, name="p") == normalize_sequence(text, name="p", unknown="X")


# Files that can be read


def test_reads_id_description_and_wrapped_sequence(write):
    path = write(">sp|P01308|INS_HUMAN Insulin OS=Homo sapiens\nMALW\nMRLL\n\n>b\tclass=mainly_beta\nkv f\tg*\n")
    good, bad = read_fasta(path)
    assert good == [
        ProteinRecord("sp|P01308|INS_HUMAN", "MALWMRLL", "Insulin OS=Homo sapiens"),
        ProteinRecord("b", "KVFG", "class=mainly_beta"),
    ]
    assert bad == []
    assert read_fasta_strict(str(path)) == good


PLAIN = b">a first\nMKTAYIA\nKQR\n>b\nGGG\n"


@pytest.mark.parametrize(
    "content",
    [
        PLAIN,
        PLAIN.replace(b"\n", b"\r\n"),
        PLAIN.replace(b"\n", b"\r"),
        PLAIN.rstrip(b"\n"),
        b"\xef\xbb\xbf" + PLAIN,
        b"\n \r\n" + PLAIN,
        PLAIN.lower(),
        PLAIN.replace(b"KQR", b"KQR*"),
        gzip.compress(PLAIN),
        gzip.compress(PLAIN[:10]) + gzip.compress(PLAIN[10:]),
    ],
    ids=["plain", "crlf", "cr", "no-newline", "bom", "blank-start", "lower", "stop", "gzip", "gzip-members"],
)
def test_variants_of_a_file_give_the_same_records(write, content):
    # Gzip is recognised by the content, not by the name.
    for name in ("x.fasta", "x.fasta.gz"):
        good, bad = read_fasta(write(content, name))
        assert [(record.id, record.sequence) for record in good] == [("a", "MKTAYIAKQR"), ("b", "GGG")]
        assert good[0].description == "first"
        assert bad == []


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("class=mainly_beta", "mainly_beta"),
        ("human class=transmembrane length=40", "transmembrane"),
        ("1.10.8.10", "mainly_alpha"),
        ("2.60.40.10", "mainly_beta"),
        ("3.40.50.720", "alpha_beta"),
        ("4.10.410.10", "little_structure"),
        ("6.10.250.10", None),
        ("version 3.40.50", None),
        ("Endolysin EC 3.2.1.17 OS=T4", None),
        ("lipase EC: 3.1.1.3", None),
        ("subclass=x", None),
        ("", None),
    ],
)
def test_structural_class_of_a_header(description, expected):
    assert ProteinRecord("p", "MKT", description).structural_class == expected


@pytest.mark.parametrize(
    ("identifier", "description", "expected"),
    [
        ("BLAT_ECOLX/24-28", "", 24),
        ("BLAT_ECOLX/24-29", "", None),
        ("x/24-28", "first_position=7", 7),
        ("x", "class=mixed first_position=-3 length=5", -3),
        ("x", "first_position=3a", None),
        ("x", "first residue 24", None),
    ],
)
def test_first_position_of_a_header(identifier, description, expected):
    assert ProteinRecord(identifier, "MKTAY", description).first_position == expected


def test_identifiers_of_uniprot_are_reduced_on_request(write):
    path = write(">sp|P69905|HBA_HUMAN Hemoglobin\nMVLS\n>other\nMK\n>tr|P69905|X_Y\nMT\n")
    good, bad = read_fasta(path)
    assert [record.id for record in good] == ["sp|P69905|HBA_HUMAN", "other", "tr|P69905|X_Y"] and bad == []
    good, [repeated] = read_fasta(path, accessions=True)
    assert [(record.id, record.description) for record in good] == [("P69905", "Hemoglobin"), ("other", "")]
    assert repeated.record == "P69905" and "repeats the identifier of record 1" in repeated.reason


@pytest.mark.parametrize("name", ["x.a3m", "x.A3M.gz"])
def test_an_alignment_is_read_without_gaps_and_with_insertions(write, name):
    content = b"#9\t1\n>ss_pred by PSIPRED\nCHHHHEEEC\n>query\nMKTAYIAKQ\n>ss_conf\n987654321\n>hit\nMK--YgsIA.KQ\n"
    good, bad = read_fasta(write(gzip.compress(content) if name.endswith("gz") else content, name))
    assert [(record.id, record.sequence) for record in good] == [("query", "MKTAYIAKQ"), ("hit", "MKYGSIAKQ")]
    assert bad == []
    with pytest.raises(FastaError, match="is empty"):
        read_fasta(write(">ss_pred\nCHHH\n", "y.a3m"))
    with pytest.raises(FastaError, match="line 1 is '#9"):
        read_fasta(write(content, "x.fasta"))


# Bad records

MIXED = ">a\nMKT\n>b\nMJT\n>a\nGGG\n>c\n>d\nM*T\n>\nMKT\n>e\nM-T\n>f\nLAG\n"


def test_bad_records_are_separated(write):
    good, bad = read_fasta(write(MIXED))
    assert [(record.id, record.sequence) for record in good] == [("a", "MKT"), ("f", "LAG")]
    assert [(problem.record, problem.reason.partition("; ")[0]) for problem in bad] == [
        ("b", "position 2 is 'J', not one of the 25 residue codes (A to Z without J)"),
        ("a", "record 3 repeats the identifier of record 1"),
        ("c", "holds no residues"),
        ("d", "position 2 is a stop '*' inside the sequence"),
        ("#6", "the header names no identifier"),
        ("e", "position 2 is '-', not one of the 25 residue codes (A to Z without J)"),
    ]


def test_gaps_of_a_file_are_removed(write):
    good, bad = read_fasta(write(MIXED), remove_gaps=True)
    assert [(record.id, record.sequence) for record in good] == [("a", "MKT"), ("e", "MT"), ("f", "LAG")]
    assert [problem.record for problem in bad] == ["b", "a", "c", "d", "#6"]


def test_two_first_positions_are_refused(write):
    good, bad = read_fasta(write(">a first_position=24 first_position=24\nMKT\n>b first_position=-2\nMKT\n"))
    assert [(one.id, one.first_position) for one in good] == [("b", -2)]
    assert bad == [BadRecord("a", "the header states `first_position` more than once; leave one")]


def test_a_first_position_is_no_identifier(write):
    good, [bad] = read_fasta(write(">first_position=24\nMKT\n>a first_position=24\nMKT\n"))
    assert [(one.id, one.first_position) for one in good] == [("a", 24)]
    assert bad.reason == "the header names no identifier; write one directly after '>'"


@pytest.mark.parametrize("stated", ["first_position=3x", "first_position=+3", "FIRST_POSITION=9", "first_position= 3"])
def test_a_first_position_in_another_form_is_refused(write, stated):
    good, [bad] = read_fasta(write(f">a {stated}\nMKT\n>b\nMKT\n"))
    assert [one.id for one in good] == ["b"]
    assert (bad.record, "is no number; write it as first_position=24" in bad.reason) == ("a", True)


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        (">a\nM1T\n>a\nMKT\n", ["position 2 is '1'", "record 2 repeats the identifier of record 1;"]),
        # Positions count residues over wrapped lines.
        (">a\r\nMKT A\r\n\r\nYI1\r\n", ["position 7 is '1'"]),
        (">a\nMKT\n  >b\nGGG\n", ["position 4 is '>'"]),
    ],
)
def test_reasons_of_bad_records(write, text, reasons):
    good, bad = read_fasta(write(text))
    assert good == []
    for problem, reason in zip(bad, reasons, strict=True):
        assert problem.reason.startswith(reason)


def test_strict_reading_names_the_first_problem_and_counts_the_others(write):
    path = write(MIXED)
    with pytest.raises(FastaError) as caught:
        read_fasta_strict(path)
    assert str(caught.value).startswith(f"{path}, record 'b': position 2 is 'J', not one of")
    assert str(caught.value).endswith(" (and 5 more bad records)")
    assert "\n" not in str(caught.value)
    assert caught.value.problems == read_fasta(path)[1]
    assert caught.value.path == str(path)
    assert isinstance(caught.value, ValueError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems) == (str(caught.value), caught.value.problems)
    for text, end in ((">a\nMJT\n", r"unknown='X'\)$"), (">a\nMJT\n>b\n", r"\(and 1 more bad record\)$")):
        with pytest.raises(FastaError, match=end):
            read_fasta_strict(write(text))


def test_messages_stay_short_and_printable(write):
    with pytest.raises(FastaError) as caught:
        read_fasta_strict(write(">" + "\x1b[31m" + "x" * 5000 + "\n"))
    assert len(str(caught.value)) < 400
    assert "\x1b" not in str(caught.value)


# Files that cannot be used


WHOLE_GZIP = gzip.compress(b"".join(b">r%d\nMKTAYIAKQRLAGVSERT\n" % i for i in range(500)))
UNUSABLE = {
    "is empty; ": [b"", b"\n\n", b" \r\n\t\n", b"\xef\xbb\xbf", gzip.compress(b"")],
    "is not FASTA: line 1 is ": [
        b"id,sequence\na,MKT\n",
        b"MKTAYIAKQR\n",
        b'{"a": "MKT"}',
        b"MKT\n>a\nGGG\n",
        b" >a\nMKT\n",
        b"@read\nACGT\n+\nIIII\n",
    ],
    "is PIR, not FASTA: a description follows line 3, '>P1;CRAB'; convert": [b">a\nMKT\n>P1;CRAB\nname of it\nMKT*\n"],
    "is not FASTA: line 3 is ": [b"\n\n# comment\n>a\nMKT\n"],
    "is not text; ": [
        b"\x80\x04\x95\xff\xfe binary",
        ">a\nMKT\n".encode("utf-16"),
        b">a r\xf6ntgen\nMKT\n",
        b">a\nMK\x00T\n",
        # Of a safetensors file.
        b"\x50\x00\x00\x00\x00\x00\x00\x00{}",
        gzip.compress(b"\xff\xfe\x00"),
        b">a\n" + b"MKT\n" * 5000 + b"\xff\n",
    ],
    "the gzip file is truncated or damaged (": [
        WHOLE_GZIP[: len(WHOLE_GZIP) // 2],
        WHOLE_GZIP[:-4],
        WHOLE_GZIP[:2],
        WHOLE_GZIP[:12],
        WHOLE_GZIP[:40] + b"\x00" * 40 + WHOLE_GZIP[80:],
        WHOLE_GZIP[:-8] + b"\x00" * 8,
        WHOLE_GZIP + b"junk",
    ],
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_a_file_that_cannot_be_used_is_refused(write, reason):
    for content in UNUSABLE[reason]:
        assert f": {reason}" in one_line_error(write(content)), content[:60]


def test_sequences_without_headers_are_told_what_they_lack(write):
    message = one_line_error(write("mktayi\nACDEF\n", "peptides.txt"))
    assert "line 1 is 'mktayi', not a header '>identifier'; put one before each sequence" in message
    assert "put one" not in one_line_error(write("id,sequence\na,ACDEF\n"))
    assert "put one" not in one_line_error(write("sequence\nACDEF\n", "peptides.csv"))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert one_line_error(tmp_path / "none.fasta").endswith(": there is no such file; check the path")
    assert "ACDEFG: there is no such file; check the path; if this is a sequence" in one_line_error("ACDEFG")
    assert ": is a folder; " in one_line_error(tmp_path)
    (tmp_path / "file").write_text(">a\nMKT\n")
    assert ": cannot be read (" in one_line_error(tmp_path / "file" / "below")


@given(st.binary(max_size=200))
def test_any_bytes_give_records_or_a_fasta_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.fasta"
    path.write_bytes(content)
    try:
        good, bad = read_fasta(path)
    except FastaError as error:
        assert error.problems
    else:
        assert good or bad
        assert all(record.id and set(record.sequence) <= set(RESIDUES) for record in good)


@given(
    st.lists(
        st.tuples(st.from_regex(r"[!-~]{1,12}", fullmatch=True), st.text(RESIDUES, min_size=1, max_size=90)),
        min_size=1,
        max_size=8,
        unique_by=lambda record: record[0],
    ),
    st.integers(1, 100),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_written_records_are_read_back(tmp_path_factory, records, width, newline, compress):
    lines = []
    for name, sequence in records:
        lines.append(f">{name} any words")
        lines += [sequence[i : i + width] for i in range(0, len(sequence), width)]
    content = newline.join(lines).encode()
    path = tmp_path_factory.getbasetemp() / "roundtrip.fasta"
    path.write_bytes(gzip.compress(content) if compress else content)
    assert read_fasta(path) == (
        [ProteinRecord(name, sequence, "any words") for name, sequence in records],
        [],
    )


# Batching


@given(st.lists(st.integers(0, 1200), max_size=60), st.integers(1, 5000))
def test_token_batches_hold_each_index_once_within_the_budget(lengths, budget):
    batches = token_batches(lengths, budget)
    order = [index for batch in batches for index in batch]
    assert order == sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget
    for batch, following in pairwise(batches):
        assert lengths[following[0]] * (len(batch) + 1) > budget, "a batch is closed only when it is full"


def test_token_batches_refuses_bad_input():
    with pytest.raises(ValueError, match="`toks_per_batch` must be at least 1, got 0"):
        token_batches([3], 0)
    with pytest.raises(ValueError, match="`lengths` must not be negative, got -2"):
        token_batches([3, -2], 10)


# Files


def test_sha256_of_a_known_value(write):
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_file(write(b"abc")) == expected
