"""CSV files in and out."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.files.csv_files import CsvError, is_table, read_csv, write_csv
from esm_turbo.files.suffixes import SuffixError


def test_columns_are_found_by_name_in_any_case(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('ID,"Receptor Sequence", Sequence \na,MKT,"AC ",\n\n,,\nb,MKT\n')
    assert read_csv(path, ["sequence"], ["id", "target"]) == [
        {"sequence": "AC", "id": "a", "target": ""},
        {"sequence": "", "id": "b", "target": ""},
    ]


def test_rows_have_line_numbers(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('id,sequence\n\na,MKT\n"b\nc",AC\n,\nd,\n')
    assert [(row["id"], row.line) for row in read_csv(path, ["id", "sequence"])] == [("a", 3), ("b\nc", 4), ("d", 7)]


@pytest.mark.parametrize("write", [lambda p, b: p.write_bytes(b), lambda p, b: p.write_bytes(gzip.compress(b))])
def test_windows_files_and_gzip(tmp_path, write):
    path = tmp_path / "x.csv"
    write(path, b"\xef\xbb\xbfsequence,id\r\nAC,a\r\n")
    assert read_csv(path, ["sequence", "id"]) == [{"sequence": "AC", "id": "a"}]


@pytest.mark.parametrize(("name", "between"), [("x.csv", ","), ("x.tsv", "\t"), ("x.TSV", "\t"), ("x.txt", ",")])
def test_the_name_says_what_separates_columns(tmp_path, name, between):
    path = tmp_path / name
    path.write_text(between.join(["id", "Sequence", "note"]) + "\n" + between.join(["a", "MKT", "x y"]) + "\n")
    [row] = read_csv(path, ["sequence"])
    assert row == {"sequence": "MKT"} and row.cells == {"id": "a", "Sequence": "MKT", "note": "x y"}


def test_a_column_may_have_another_name(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("Binder,id\nAC,a\n")
    [row] = read_csv(path, ["sequence"], aliases={"sequence": "binder"})
    assert row == {"sequence": "AC"}
    path.write_text("peptide\nAC\n")
    with pytest.raises(CsvError, match=r"the column 'sequence' \(or 'binder'\); its first line, .*, is 'peptide'$"):
        read_csv(path, ["sequence"], aliases={"sequence": "binder"})


@pytest.mark.parametrize(
    ("name", "mark", "said"),
    [("x.csv", ";", "';'"), ("x.csv", "\t", "tabs"), ("x.tsv", ",", "','"), ("x.csv", "|", "'|'")],
)
def test_other_separators_are_named(tmp_path, name, mark, said):
    path = tmp_path / name
    path.write_text(f"id{mark}sequence\na{mark}AC\n")
    with pytest.raises(CsvError) as caught:
        read_csv(path, ["sequence"])
    assert str(caught.value).endswith(f"; separate columns by commas, or by tabs in a .tsv file, not by {said}")


def test_all_columns_keep_their_names(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("ID,Assay Score,,Note\na,=1,,x\nb\n")
    assert [row.cells for row in read_csv(path, ["id"])] == [
        {"ID": "a", "Assay Score": "=1", "Note": "x"},
        {"ID": "b", "Assay Score": "", "Note": ""},
    ]


@given(
    st.lists(st.lists(st.text("abc,\"'é\n;=+-@\t\x1b\\x1", min_size=1, max_size=5), min_size=2, max_size=2), max_size=5)
)
def test_written_tables_are_read_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    write_csv(path, ["one", "two"], rows)
    expected = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    assert [[row["one"], row["two"]] for row in read_csv(path, ["one", "two"])] == expected


def test_spreadsheets_run_nothing_and_numbers_stay_numbers(tmp_path):
    path = tmp_path / "x.csv"
    write_csv(path, ["id", "=cmd|x!A1"], [["=HYPERLINK(A1)", -1.5], ["@x", "-2.5"], ["a\x1b[2J", None], ["-x", 3]])
    assert path.read_bytes() == b"id,'=cmd|x!A1\n'=HYPERLINK(A1),-1.5\n'@x,-2.5\na\\x1b[2J,\n'-x,3\n"
    assert list(read_csv(path, ["id"])[0].cells) == ["id", "=cmd|x!A1"]


def test_the_suffix_decides_the_delimiter(tmp_path):
    for name, text in {"x.csv": "one,two\na,b\n", "x.TSV": "one\ttwo\na\tb\n", "x": "one,two\na,b\n"}.items():
        write_csv(tmp_path / name, ["one", "two"], [["a", "b"]])
        assert (tmp_path / name).read_text() == text
    with pytest.raises(SuffixError, match=r"must end in \.csv or \.tsv, or have no suffix; got \.parquet"):
        write_csv(tmp_path / "x.parquet", ["one"], [["a"]])
    assert not (tmp_path / "x.parquet").exists()


def test_a_failed_write_leaves_nothing(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("old")

    def rows():
        yield ["a"]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_csv(path, ["one"], rows())
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]
    assert path.read_text() == "old"


def test_quotation_marks_between_tabs_swallow_no_rows(tmp_path):
    """Most programs that write tabs quote nothing."""
    path = tmp_path / "x.tsv"
    path.write_text('id\tsequence\tnote\na\tAA\t"5\' end\nb\tCC\tof x"\nc\tDD\t\n')
    with pytest.raises(CsvError, match=r"line 2 has a quotation mark that ends in line 3; remove it$"):
        read_csv(path, ["sequence"])
    path.write_text('id\tsequence\tnote\na\tAA\t"x"\nb\tCC\t\n')
    assert [row["sequence"] for row in read_csv(path, ["sequence"])] == ["AA", "CC"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; its first line must name the columns"),
        (b"\n\n", "is empty"),
        (b"id,peptide\na,AC\n", "lacks the column 'sequence' (or 'binder'); there are 'id', 'peptide'"),
        (b"sequence,id, Sequence\nAC,a,GG\n", "has the column 'sequence' twice; remove or rename one"),
        (b"id,note,ID,sequence\na,x,b,AC\n", "has the column 'id' twice"),
        (b"Sequence,binder\nAC,GG\n", "has the columns 'sequence' and 'binder', which mean the same"),
        (b"sequence,id\nAC,a,,\nGG,b,c\n", "line 3 has 3 cells, the first line names 2 columns; quote cells"),
        (b">a\nMKT\n", "lacks the column 'sequence' (or 'binder'); its first line, which names the columns, is '>a'"),
        (b"sequence\n\xff\xfe\n", "is not text"),
        (b'sequence\n"AC\n', "is not CSV (unexpected end of data)"),
        (gzip.compress(b"sequence\nAC\n" * 99)[:-9], "the gzip file is truncated or damaged"),
    ],
    # Named, because the bytes of gzip contain the time: two test processes would give the test different names.
    ids=[
        "empty",
        "blank",
        "no-column",
        "twice",
        "other-twice",
        "alias",
        "long-row",
        "fasta",
        "not-utf-8",
        "open-quote",
        "gzip",
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(CsvError) as caught:
        read_csv(path, ["sequence"], aliases={"sequence": "binder"})
    assert str(caught.value).startswith(f"{path}: {message}")


def test_missing_files_and_folders_are_refused(tmp_path):
    for path, reason in (
        (tmp_path / "missing.csv", "there is no such file; check the path"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(CsvError, match=reason):
            read_csv(path, ["sequence"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.csv", True), ("a.CSV.gz", True), ("a.tsv", True), ("a.fasta", False), ("csv", False), ("a.csv.fa", False)],
)
def test_names(name, expected):
    assert is_table(name) is expected
