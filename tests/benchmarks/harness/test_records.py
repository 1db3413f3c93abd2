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


def test_appended_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "speed.jsonl"
    first = records.append(path, "speed", FIGURES, model="esm2-mini")
    second = records.append(path, "accuracy", {"cosine": 0.5})
    assert records.read(path) == [first, second]
    assert records.read(path, "speed") == [first]
    assert records.read(path, "memory") == []
    assert first["figures"] == FIGURES
    assert first["model"] == "esm2-mini"
    assert second["model"] is None


def test_a_record_has_its_environment(tmp_path: Path) -> None:
    record = records.append(tmp_path / "r.jsonl", "speed", FIGURES, device=torch.device("cpu"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["date"])
    environment = record["environment"]
    assert environment["device"] == "cpu"
    assert environment["device_name"] == environment["processor"] != ""
    assert environment["threads"] == torch.get_num_threads()
    assert environment["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "numpy", "safetensors"} <= set(environment["versions"])


def test_earlier_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records.append(path, "speed", FIGURES)
    before = path.read_bytes()
    records.append(path, "speed", FIGURES)
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_non_finite_figures_are_refused_and_nothing_is_written(tmp_path: Path, figure: float) -> None:
    path = tmp_path / "r.jsonl"
    records.append(path, "speed", FIGURES)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.append(path, "speed", {"cosine": figure})
    with pytest.raises(TypeError):
        records.append(path, "speed", {"shape": torch.Size([1])[:0], "tensor": torch.zeros(1)})
    with pytest.raises(ValueError, match="`kind`"):
        records.append(path, "", {})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1]", "line 2: lacks format_version, kind"),
        ('{"kind": "speed"}', "line 2: lacks format_version, date"),
    ],
)
def test_a_damaged_line_is_reported(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    records.append(path, "speed", FIGURES)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        records.read(path)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record = records.append(path, "speed", FIGURES)
    path.write_text(json.dumps(record | {"format_version": 99}) + "\n")
    with pytest.raises(ValueError, match="format version 99, this reads 1"):
        records.read(path)


def test_lines_of_concurrent_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    figures = {"values": list(range(3000))}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: records.append(path, f"kind{n}", figures), range(16)))
    written = records.read(path)
    assert sorted(record["kind"] for record in written) == sorted(f"kind{n}" for n in range(16))
    assert all(record["figures"] == figures for record in written)


def test_a_copy_without_history_names_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "source_revision", lambda: None)
    monkeypatch.delenv(records.REVISION_VARIABLE, raising=False)
    assert records.append(tmp_path / "r", "speed", {})["revision"] is None
    monkeypatch.setenv(records.REVISION_VARIABLE, "abc dirty")
    assert records.append(tmp_path / "r", "speed", {})["revision"] == {"commit": "abc", "dirty": True}
    monkeypatch.setenv(records.REVISION_VARIABLE, "abc")
    assert records.append(tmp_path / "r", "speed", {})["revision"] == {"commit": "abc", "dirty": False}
