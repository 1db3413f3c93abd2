"""Results as JSON lines."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.harness import records

FIGURES = {"milliseconds": [1.5, 2.0], "shape": {"tokens": 512}, "note": None}


def test_appended_records_are_read_back_and_earlier_lines_kept(tmp_path: Path) -> None:
    path = tmp_path / "results" / "speed.jsonl"
    first = records.append(path, "speed", FIGURES, model="esm2-mini")
    before = path.read_bytes()
    second = records.append(path, "accuracy", {"cosine": 0.5})
    assert path.read_bytes().startswith(before) and path.read_bytes().count(b"\n") == 2
    assert records.read(path) == [first, second]
    assert records.read(path, "speed") == [first]
    assert records.read(path, "memory") == []
    assert first["figures"] == FIGURES
    assert (first["model"], second["model"]) == ("esm2-mini", None)


def test_a_record_has_its_environment(tmp_path: Path) -> None:
    record = records.append(tmp_path / "r.jsonl", "speed", FIGURES, device=torch.device("cpu"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["date"])
    environment = record["environment"]
    assert environment["device"] == "cpu"
    assert environment["device_name"] == environment["processor"] != ""
    assert environment["threads"] == torch.get_num_threads()
    assert environment["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "numpy", "safetensors"} <= set(environment["versions"])


@pytest.mark.parametrize(
    ("kind", "figures", "error", "message"),
    [
        ("speed", {"cosine": math.nan}, ValueError, "not JSON compliant"),
        ("speed", {"cosine": math.inf}, ValueError, "not JSON compliant"),
        ("speed", {"tensor": torch.zeros(1)}, TypeError, "not JSON serializable"),
        ("", {}, ValueError, "`kind`"),
    ],
)
def test_what_is_no_record_is_refused_and_nothing_written(
    tmp_path: Path, kind: str, figures: dict[str, object], error: type[Exception], message: str
) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(error, match=message):
        records.append(path, kind, figures)
    assert not path.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1]", "line 2: lacks format_version, kind"),
        ('{"kind": "speed"}', "line 2: lacks format_version, date"),
        (json.dumps(dict.fromkeys(records._FIELDS, 99)), "line 2: format version 99, this reads 1"),
    ],
)
def test_a_damaged_line_or_another_version_is_reported(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    records.append(path, "speed", FIGURES)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        records.read(path)


def test_lines_of_concurrent_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    figures = {"values": list(range(3000))}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: records.append(path, f"kind{n}", figures), range(16)))
    written = records.read(path)
    assert sorted(record["kind"] for record in written) == sorted(f"kind{n}" for n in range(16))
    assert all(record["figures"] == figures for record in written)


@pytest.mark.parametrize(
    ("named", "revision"),
    [
        ("", None),
        ("abc dirty", {"commit": "abc", "dirty": True}),
        ("abc", {"commit": "abc", "dirty": False}),
    ],
)
def test_a_copy_without_history_names_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, revision: dict[str, object] | None
) -> None:
    monkeypatch.setattr(records, "source_revision", lambda: None)
    monkeypatch.setenv(records.REVISION_VARIABLE, named)
    assert records.append(tmp_path / "r", "speed", {})["revision"] == revision
