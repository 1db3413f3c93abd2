"""Pictures of the files that `esm-turbo embed` wrote."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo.pictures.embedded import Groups, check_drawable, read_groups
from esm_turbo.proteins.fasta import ProteinRecord

PROTEINS = [ProteinRecord("sp|P1|A_B", "MKTAY"), ProteinRecord("two", "GSGS")]


def test_groups_of_a_table(tmp_path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("note,ID,Family\nx,P1,u\ny,two,v\nz,unknown,w\n")
    assert read_groups(path, PROTEINS) == Groups("note", {"sp|P1|A_B": "x", "two": "y"})
    assert read_groups(path, PROTEINS, "family").of(PROTEINS) == ["u", "v"]


def test_numbers_are_numbers_if_all_proteins_have_one() -> None:
    numbers = Groups("n", {"sp|P1|A_B": "1", "two": "2.5"}).of(PROTEINS)
    assert isinstance(numbers, np.ndarray) and numbers.tolist() == [1.0, 2.5]
    assert Groups("n", {"two": "2.5"}).of(PROTEINS) == ["not given", "2.5"]


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("id\ntwo\n", None, "needs a column besides 'id'"),
        ("id,a\n", None, "needs a column besides 'id', and at least one row"),
        ("id,a\nthree,x\n", None, r"names none of the proteins, such as 'sp\|P1\|A_B'"),
        ("id,a\ntwo,x\n", "b", "lacks the column 'b'"),
    ],
)
def test_bad_tables(text: str, column: str | None, message: str, tmp_path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_groups(path, PROTEINS, column)


def test_what_can_be_drawn() -> None:
    assert check_drawable(3, ("mean", "contacts")) == 4
    assert check_drawable(1, ("mean", "contacts")) == 1
    with pytest.raises(ValueError, match="give --include contacts or mean, got mean for 1"):
        check_drawable(1, ("mean",))
