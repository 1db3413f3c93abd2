"""Results as JSON lines."""

from __future__ import annotations

import json
import math
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.harness import records
from esm_turbo.evaluate.environment import source_revision

FIGURES = {"milliseconds": [1.5, 2.0], "shape": {"tokens": 512}, "note": None}


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "speed.jsonl"
    first = records.append(path, "speed", FIGURES, model="esm2-mini")
    second = records.append(path, "accuracy", {"cosine": 0.5})
    assert records.read(path) == [first, second]
    assert records.read(path, "speed") == [first]
    assert records.read(path, "memory") == []
    assert first["figures"] == FIGURES
    assert first["model"] == "esm2-mini"
    assert second["model"] is None


def test_a_record_names_what_it_was_measured_with(tmp_path: Path) -> None:
    record = records.append(tmp_path / "r.jsonl", "speed", FIGURES, device=torch.device("cpu"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["date"])
    environment = record["environment"]
    assert environment["device"] == "cpu"
    assert environment["device_name"] == environment["processor"] != ""
    assert environment["threads"] == torch.get_num_threads()
    assert environment["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "numpy", "safetensors"} <= set(environment["versions"])


def test_earlier_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records.append(path, "speed", FIGURES)
    before = path.read_bytes()
    records.append(path, "speed", FIGURES)
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_what_json_has_no_number_for_is_refused_and_nothing_written(tmp_path: Path, figure: float) -> None:
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
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
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


def git(folder: Path, *arguments: str) -> str:
    options = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *options, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_revision_says_whether_sources_differ_from_the_commit(tmp_path: Path) -> None:
    assert source_revision(tmp_path) is None
    (tmp_path / "esm_turbo").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    source = tmp_path / "esm_turbo" / "module.py"
    source.write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    # Results grow while they are measured, and notes decide nothing.
    (tmp_path / "benchmarks" / "results" / "r.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("note\n")
    revision = source_revision(tmp_path)
    assert revision is not None
    assert (revision.commit, revision.dirty) == (commit, False)
    source.write_text("x = 2\n")
    revision = source_revision(tmp_path)
    assert revision is not None
    assert (revision.commit, revision.dirty) == (commit, True)
