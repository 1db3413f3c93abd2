"""Records of a CSV file: good ones are returned, bad ones reported in the order of the file."""

from __future__ import annotations

import pytest

from esm_turbo.files.csv_files import CsvError, CsvRow
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.proteins.lookup import ProteinIndex
from esm_turbo.tasks.common.records import kept_columns, listed_lines, parse_rows


def rows(*values: str) -> list[CsvRow]:
    return [CsvRow({"x": value}, line) for line, value in enumerate(values, start=2)]


def name(row: CsvRow) -> str:
    return f"line {row.line}"


def parse(number: int, row: CsvRow) -> tuple[int, int]:
    return number, int(row["x"])


def test_good_and_bad_rows() -> None:
    good, bad = parse_rows("a.csv", rows("7", "x", "8", ""), "numbers", name, parse)
    assert good == [(1, 7), (3, 8)]
    assert [one.record for one in bad] == ["line 3", "line 5"]
    assert bad[0].reason == "invalid literal for int() with base 10: 'x'"


def test_a_reason_loses_the_name_of_its_row() -> None:
    def refuse(number: int, row: CsvRow) -> None:
        raise ValueError(f"{name(row)}: is wrong")

    assert parse_rows("a.csv", rows("7"), "numbers", name, refuse) == ([], [BadRecord("line 2", "is wrong")])


def test_no_rows() -> None:
    with pytest.raises(CsvError, match=r"^a.csv: holds no numbers; give at least one below the column names$"):
        parse_rows("a.csv", [], "numbers", name, parse)


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(KeyError):
        parse_rows("a.csv", rows("7"), "numbers", name, lambda number, row: row["y"])


def find(number: int, row: CsvRow) -> str:
    return ProteinIndex([ProteinRecord("a", "MK")], "target").find(row["x"]).id


def test_one_unknown_name_is_the_record_of_its_row() -> None:
    good, bad = parse_rows("a.csv", rows("a", "b"), "rows", name, find)
    assert good == ["a"]
    assert bad == [BadRecord("line 3", "there is no usable target 'b'; there are 'a'")]


def test_many_unknown_names_are_one_record() -> None:
    good, bad = parse_rows("a.csv", rows("b", "a", "c", "b"), "rows", name, find)
    assert good == ["a"]
    reason = "there is no usable target 'b', 'c'; there are 'a'"
    assert bad == [BadRecord("lines 2, 4, 5", reason, count=3)]


def test_a_column_of_unknown_names_is_one_error() -> None:
    with pytest.raises(CsvError, match=r"^a.csv: no row names a usable target, but 'b', 'c'; there are 'a'$"):
        parse_rows("a.csv", rows("b", "c", "b"), "rows", name, find)


def test_lines() -> None:
    assert listed_lines([2]) == "line 2"
    assert listed_lines([2, 5, 6, 7, 9]) == "lines 2, 5, 6 and 2 more"


def test_columns_of_results_replace_those_of_the_input() -> None:
    assert kept_columns([{"Note": "x", "Rank": "1", "y": ""}, {"Note": "z"}], ["rank", "score"]) == ["Note", "y"]
    assert kept_columns([], ["rank"]) == []
