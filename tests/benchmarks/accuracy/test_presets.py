"""Rows of accuracy, and of optional presets."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy import presets as accuracy
from esm_turbo.config import OPTIONAL_PRESETS, PRESETS


def test_a_row_of_accuracy_has_all_figures_of_its_preset() -> None:
    [one] = accuracy.preset_cases({"paper": PRESETS["paper"]}, ("paper_six",), 1)
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    assert row["proteins"] == "paper_six.fasta"
    assert row["provenance"]["residues"] == 30
    assert row["provenance"]["calibration"]["sequences"] == 640
    preset = row["preset"]
    assert preset["name"] == "paper"
    assert preset["memory"]["bits_per_element"] == pytest.approx(4, abs=0.01)
    assert preset["leave_one_out"]["against_frozen"]["residues"]["tokens"] == 30
    assert len(preset["leave_one_out"]["by_layer"]) == 12
    assert [(e["new_residues"], e["refreshed"]) for e in preset["extend"]] == [
        (k, w) for k in (1, 8, 32) for w in (0, 8, 32)
    ]


def test_missing_optional_presets_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from esm_turbo.codecs.peers.hugging_face import HqqCodec, QuantoCodec

    def missing(*_: Any) -> Any:
        raise ValueError("needs optional packages")

    for codec in (QuantoCodec, HqqCodec):
        monkeypatch.setattr(codec, "_new_layer", missing)
    assert list(accuracy.optional_cases()) == []
    printed = capsys.readouterr().out
    assert all(f"{name}: needs optional packages" in printed for name in OPTIONAL_PRESETS)
