"""Descriptions of text files: results of commands, tables, and sequences."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from esm_turbo.files.suffixes import TABLE_DELIMITERS
from esm_turbo.files.text_files import text_lines
from esm_turbo.proteins.fasta import read_fasta


def text_info(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Describe a file of text, plain or gzip; None for one that is not text, or none of these kinds.

    Args:
        path: JSON as written by `--json`, a table as by `--out`, or FASTA.
    """
    path = Path(path)
    try:
        lines = text_lines(path, newline="")
        begin = next((line.strip() for line in lines if line.strip()), "")
        if begin.startswith(">"):
            return _sequences(path)
        if begin.startswith("{"):
            return _result(path)
        delimiter = TABLE_DELIMITERS.get(Path(path.name.lower().removesuffix(".gz")).suffix)
        return None if delimiter is None else _table(path, delimiter)
    # Anything that cannot be read as text is described by others, or refused.
    except (ValueError, csv.Error):
        return None


def _sequences(path: Path) -> dict[str, Any]:
    good, bad = read_fasta(path)
    lengths = [len(record.sequence) for record in good] or [0]
    return {
        "kind": "sequences",
        "proteins": len(good),
        "residues": sum(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        "unusable_records": len(bad),
    }


def _result(path: Path) -> dict[str, Any] | None:
    content = json.loads("".join(text_lines(path)))
    run = content.get("run")
    described: dict[str, Any] = {"kind": "result"} | (run if isinstance(run, dict) else {})
    counts = {name: len(value) for name, value in content.items() if isinstance(value, list)}
    return described | {"holds": list(content)} | counts


def _table(path: Path, delimiter: str) -> dict[str, Any]:
    rows = csv.reader(text_lines(path, newline=""), delimiter=delimiter, strict=True)
    columns = next(rows, [])
    return {"kind": "table", "columns": columns, "rows": sum(1 for row in rows if any(row))}
