"""Hardware counters from the raw page of ncu."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.cuda.kernel_profile import COUNTERS, KERNEL, figures_of, main
from benchmarks.harness import records
from benchmarks.report import tables_gpu


def page(path: Path, kernels: list[str], unit: str = "Tbyte/s") -> Path:
    """A page with 1,000 i for every counter of launch i."""
    head = ["ID", "Kernel Name", *COUNTERS.values()]
    units = ["", "", *(unit if name == COUNTERS["memory, GB/s"] else "" for name in COUNTERS.values())]
    rows = [[str(i), kernel, *[f"{1000 * i:,}"] * len(COUNTERS)] for i, kernel in enumerate(kernels)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, units, *rows])
    return path


def test_the_second_launch_of_every_case_is_used(tmp_path: Path) -> None:
    report = page(tmp_path / "page.csv", [KERNEL, "merge", KERNEL, KERNEL, KERNEL])
    found = figures_of(report, ["first", "second"])
    assert {name: case["warp instructions"] for name, case in found.items()} == {"first": 2000, "second": 4000}
    assert found["first"].keys() == COUNTERS.keys()


@pytest.mark.parametrize(("unit", "expected"), [("Tbyte/s", 1e6), ("Gbyte/s", 1e3)])
def test_bytes_per_second_in_either_unit(tmp_path: Path, unit: str, expected: float) -> None:
    [case] = figures_of(page(tmp_path / "page.csv", [KERNEL, KERNEL], unit), ["only"]).values()
    assert case["memory, GB/s"] == expected


def test_a_page_of_other_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected two launches of each of 2 cases, found 3"):
        figures_of(page(tmp_path / "page.csv", [KERNEL] * 3), ["first", "second"])


def test_a_page_is_appended_and_shown_in_a_table(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "device_name", lambda device: "a device")
    report = page(results / "page.csv", [KERNEL, KERNEL])
    out = str(results / "gpu_profile.jsonl")
    assert main(["--add", str(report), "--names", "only", "--out", out]) == 0
    text = tables_gpu.TABLES["gpu_profile"]()
    assert "| registers per thread | 1,000 |" in text
    assert "Measured with the transforms and bit widths of one esm2-mini layer and random codes, on a device" in text
