"""Rows of accuracy."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.presets import preset_cases
from esm_turbo.config import PRESETS


def test_every_preset_has_a_row_with_all_its_figures() -> None:
    [case] = preset_cases({name: PRESETS[name] for name in ("exact", "paper")}, ("paper_six",), 1)
    assert case.name == "paper_six" and case.check().passed
    exact, paper = case.measure(1)
    for row in (exact, paper):
        assert row["proteins"] == "paper_six.fasta"
        assert row["provenance"]["residues"] == 30
        assert row["provenance"]["calibration"]["sequences"] == 640
    assert exact["preset"]["leave_one_out"]["against_frozen"]["residues"]["kl_mean"] == 0
    preset = paper["preset"]
    assert (exact["preset"]["name"], preset["name"]) == ("exact", "paper")
    assert preset["memory"]["bits_per_element"] == pytest.approx(4, abs=0.01)
    assert preset["leave_one_out"]["against_frozen"]["residues"]["tokens"] == 30
    assert preset["leave_one_out"]["against_frozen"]["residues"]["kl_mean"] > 0
    assert len(preset["leave_one_out"]["by_layer"]) == 12
    sizes = [(e["new_residues"], e["refreshed"]) for e in preset["extend"]]
    assert sizes == [(k, w) for k in (1, 8, 32) for w in (0, 8, 32)]
