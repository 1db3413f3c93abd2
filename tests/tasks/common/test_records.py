"""Records of a CSV file: what its readers in `scoring` and `variants` do not show."""

from __future__ import annotations

import pytest

from esm_turbo.files.csv_files import CsvRow
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord
from esm_turbo.proteins.lookup import ProteinIndex
from esm_turbo.tasks.common.records import parse_rows


def rows(*values: str) -> list[CsvRow]:
    return [CsvRow({"x": value}, line) for line, value in enumerate(values, start=2)]


def name(row: CsvRow) -> str:
    return f"line {row.line}"


def test_a_reason_loses_the_name_of_its_row() -> None:
    def refuse(number: int, row: CsvRow) -> None:
        raise ValueError(f"{name(row)}: is wrong")

    assert parse_rows("a.csv", rows("7"), "numbers", name, refuse) == ([], [BadRecord("line 2", "is wrong")])


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(KeyError):
        parse_rows("a.csv", rows("7"), "numbers", name, lambda number, row: row["y"])


def find(number: int, row: CsvRow) -> str:
    return ProteinIndex([ProteinRecord("a", "MK")], "target").find(row["x"]).id


def test_many_unknown_names_are_one_record() -> None:
    good, bad = parse_rows("a.csv", rows("b", "a", "c", "b"), "rows", name, find)
    assert good == ["a"]
    reason = "there is no usable target 'b', 'c'; there are 'a'"
    assert bad == [BadRecord("lines 2, 4, 5", reason, count=3)]
