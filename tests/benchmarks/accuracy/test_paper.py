"""The paper's tables on the embedded model."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import paper
from esm_turbo.config import Geometry


def test_bytes_in_the_geometry_of_650m() -> None:
    [one] = paper.memory_cases({"650M": Geometry(33, 20, 64)})
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    presets = row["presets"]
    assert presets["fp32"]["bytes"] == 330 * 2**20
    assert presets["paper"]["bits_per_element"] == pytest.approx(4, abs=0.001)
    for bits in (4, 3, 2, 1):
        assert presets[f"turbo{bits}"]["bits_per_element"] <= bits + 0.05


def test_a_row_of_the_papers_proteins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "TESTED_PRESETS", ("paper", "turbo1"))
    [one] = paper.protein_cases(1)
    row = one.measure(1)
    assert isinstance(row, dict)
    assert (row["protein"], row["residues"]) == ("insulin_B_chain", 30)
    assert row["prefill"]["cosine_mean"] == pytest.approx(1, abs=1e-9)
    assert row["prefill"]["largest_difference"] < 1e-5
    assert set(row["presets"]) == {"paper", "turbo1"}
    assert [(e["new_residues"], e["refreshed"]) for e in row["frozen"]["extend"]] == [(1, 0), (1, 8)]
