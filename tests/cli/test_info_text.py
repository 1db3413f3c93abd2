"""Text files are described by what they begin with and how they are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from esm_turbo.cli.info_text import text_info


def test_sequences(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(b"\n>a\nMKT\n>b\nMKTAY\n>c\nM-\n"))
    assert text_info(tmp_path / "x") == {
        "kind": "sequences", "proteins": 2, "residues": 8, "shortest": 3, "longest": 5, "unusable_records": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "separator"), [("x.csv", ","), ("x.TSV", "\t"), ("x.csv.gz", ",")])
def test_tables(tmp_path: Path, name: str, separator: str) -> None:
    (tmp_path / name).write_text(f"id{separator}score\na{separator}1\n\nb{separator}2\n")
    assert text_info(tmp_path / name) == {"kind": "table", "columns": ["id", "score"], "rows": 2}


def test_results(tmp_path: Path) -> None:
    run = {"model": "esm2-mini", "device": "cpu"}
    (tmp_path / "x").write_text(json.dumps({"run": run, "results": [1, 2], "failed": []}, indent=2))
    assert text_info(tmp_path / "x") == {
        "kind": "result", **run, "holds": ["run", "results", "failed"], "results": 2, "failed": 0,
    }  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"some words", b"{ not JSON", b"\xff\xfe\x00", b'id\nopen "quote'])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert text_info(tmp_path / "x") is None
