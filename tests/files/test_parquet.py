"""Tables in Parquet."""

from __future__ import annotations

from pathlib import Path

import pandas
import pyarrow.parquet
import pytest

from esm_turbo.files import parquet
from esm_turbo.files.parquet import METADATA_KEY, parquet_info, parquet_settings, write_parquet

COLUMNS, TYPES = ["id", "rank", "score"], {"rank": int, "score": float}
ROWS = [["=a", 1, -0.5], ["b\x1b", 2, 1e-300]]


def test_numbers_are_numbers_and_text_is_as_it_was(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", COLUMNS, ROWS, TYPES, {"model": "m"})
    table = pyarrow.parquet.read_table(tmp_path / "x.parquet")
    assert [list(row.values()) for row in table.to_pylist()] == ROWS
    assert [str(field.type) for field in table.schema] == ["string", "int64", "double"]
    assert METADATA_KEY in table.schema.metadata
    assert parquet_settings(tmp_path / "x.parquet")["model"] == "m"
    info = parquet_info(tmp_path / "x.parquet")
    assert (info["rows"], info["columns"]) == (2, {"id": "string", "rank": "int64", "score": "double"})


def test_no_text_is_no_value(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", COLUMNS, [[None, 1, None]], TYPES, {})
    assert pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist() == [{"id": None, "rank": 1, "score": None}]


def test_a_folder_of_parts_is_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 2)
    write_parquet(tmp_path / "1.parquet", COLUMNS, [*ROWS, ["c", 3, 0.0]], TYPES, {})
    # The schema does not depend on the rows, of which there may be none.
    write_parquet(tmp_path / "2.parquet", COLUMNS, [], TYPES, {})
    # What begins with an underscore is no part.
    (tmp_path / "_3.json").write_text("{}")
    frame = pandas.read_parquet(tmp_path)
    assert frame["rank"].tolist() == [1, 2, 3] and frame["score"].dtype == "float64"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, COLUMNS, ROWS, TYPES, {})
    before = path.read_bytes()

    def broken():
        yield ROWS[0]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_parquet(path, COLUMNS, broken(), TYPES, {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, COLUMNS, ROWS, TYPES, {})
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ValueError, match=r"x\.parquet: damaged, or not a Parquet file"):
        parquet_settings(path)
