"""Rows of accuracy, of optional presets, and of planted outliers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy import presets as accuracy
from benchmarks.harness import embedded
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


def test_a_row_of_outliers_has_one_preset_at_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "OUTLIER_CALIBRATION_PROTEINS", 2)
    monkeypatch.setattr(accuracy, "evaluation_set", lambda name, most: embedded.evaluation_set("paper_six", 1))
    presets = {name: PRESETS[name] for name in ("exact", "int4", "turbo3")}
    sizes = list(accuracy.outlier_cases(presets, 1))
    assert [one.name for one in sizes] == [f"outliers x{scale}" for scale in (1, 10, 60, 200)]
    rows = sizes[2].measure(1)
    assert isinstance(rows, list)
    found = {row["preset"]: row for row in rows}
    assert list(found) == ["int4", "turbo3"]
    assert all(row["scale"] == 60 and row["calibration_proteins"] == 2 for row in rows)
    kl = {name: row["against_frozen"]["residues"]["kl_mean"] for name, row in found.items()}
    assert kl["turbo3"] < 0.1 * kl["int4"]
    assert found["turbo3"]["drift"]["residues"]["relative_rms_error"] < 1e-4
