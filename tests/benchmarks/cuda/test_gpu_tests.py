"""Records of the tests that need a CUDA device."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

from benchmarks.cuda import gpu_tests
from benchmarks.cuda.gpu_tests import summary
from benchmarks.harness import records

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_graphs" name="test_a" time="1.5"/>
<testcase classname="tests.test_graphs" name="test_b[x]" time="0.25"><failure message="no">trace</failure></testcase>
<testcase classname="tests.test_triton_encode" name="test_c" time="0.25"><skipped/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_counted_by_file_and_failures_named(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    assert summary(path) == {
        "outcomes": {"passed": 1, "failure": 1, "skipped": 1},
        "by_file": {"test_graphs": {"passed": 1, "failure": 1}, "test_triton_encode": {"skipped": 1}},
        "failed": ["test_graphs::test_b[x]"],
        "test_seconds": 2.0,
    }


def test_every_file_has_a_row(tmp_path, monkeypatch):
    """Even if a later one writes no report; the exit code is that of the failure."""
    files = [tmp_path / f"test_{name}.py" for name in "abc"]
    for file in files:
        file.touch()

    def run(command: list[str], check: bool) -> SimpleNamespace:
        report = next(word.removeprefix("--junitxml=") for word in command if word.startswith("--junitxml="))
        if command[-1] != str(files[2]):
            Path(report).write_text(REPORT)
        return SimpleNamespace(returncode=int(command[-1] == str(files[1])))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(records, "append", lambda out, kind, figures, device: rows.append((out, kind, figures)))
    rows: list = []
    out = tmp_path / "out.jsonl"
    assert gpu_tests.main(["--out", str(out), "-q", *map(str, files)]) == 1
    assert [figures["command"].split()[-2:] for _, _, figures in rows] == [["-q", str(file)] for file in files[:2]]
    assert {(path, kind) for path, kind, _ in rows} == {(out, "gpu_tests")}
