"""The suffix of a table decides its format."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet
import pytest

from esm_turbo.files.suffixes import SuffixError
from esm_turbo.files.tables import write_table

TABLE = (["id", "n"], [["=a", 1]], {"n": int}, {})


def test_every_format_has_the_same_rows(tmp_path: Path) -> None:
    for name in ("x.csv", "x.tsv", "x", "x.parquet"):
        write_table(tmp_path / name, *TABLE)
    assert (tmp_path / "x.csv").read_text() == (tmp_path / "x").read_text() == "id,n\n'=a,1\n"
    assert (tmp_path / "x.tsv").read_text() == "id\tn\n'=a\t1\n"
    assert pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist() == [{"id": "=a", "n": 1}]
    write_table(file := io.StringIO(), *TABLE)
    assert file.getvalue() == "id,n\n'=a,1\n"


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SuffixError, match=r"must end in \.csv, \.tsv or \.parquet"):
        write_table(tmp_path / "x.xlsx", *TABLE)
    assert not list(tmp_path.iterdir())
