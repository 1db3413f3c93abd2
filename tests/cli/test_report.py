"""What commands print: units, values, and tables."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from esm_turbo.cli.report import bytes_text, calibration_report, info_report


def text_of(*parts: object) -> str:
    out = io.StringIO()
    console = Console(width=120, file=out)
    for part in parts:
        console.print(part)
    return out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.9 * 2**30, "1.9 GiB"), (2**51, "2048.0 TiB")],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_calibration_by_class_and_length(turbo: Any) -> None:
    record = turbo.calibration.provenance
    quality = turbo.calibration.quality
    result = {"out": "c.safetensors", "provenance": record, "bytes": 2**20, "quality": quality.to_dict()}
    text = text_of(*calibration_report(result, turbo.calibration.geometry))
    assert "c.safetensors, 1.0 MiB" in text.replace("\n", " ")
    for name, group in {**record["classes"], **record["lengths"]}.items():
        [row] = [line.split() for line in text.splitlines() if name in line.split()]
        assert f"{group['sequences']:,}" in row and f"{group['residues']:,}" in row
    assert f"calibrated on {record['sequences']:,} proteins" in text.replace("\n", " ")
    for name, figures in quality.presets.items():
        [row] = [line.split("│") for line in text.splitlines() if line.startswith(f"│ {name} ")]
        assert row[2].strip() == f"{figures.cosine_mean:.5f}" and row[-2].strip() == "yes"


def test_values_of_every_type() -> None:
    result = {
        "kind": "cache",
        "geometry": {"num_layers": 2, "num_heads": 4, "head_dim": 16},
        "lengths": [11, 4],
        "options": {"bits": 3},
        "calibrated": True,
        "bits_per_element": 3.14159,
        "bytes": 12345,
        "cache": {"batch_size": 3, "tokens": 1024, "presets": {"exact": sizes(4096.0, 32.0, 1.0)}},
        "environment": {"torch": "2.11"},
        "truncation": None,
    }
    rows = {tuple(line.split()) for line in text_of(*info_report(result)).splitlines()}
    for row in (
        "geometry 2 layers x 4 heads x 16",
        "lengths 11, 4",
        "options bits 3",
        "calibrated yes",
        "bits per element 3.142",
        "bytes 12,345",
        "cache of 3 x 1,024 tokens",
        "│ exact │ 4.0 KiB │ 32.00 │ 1.00x │",
        "torch 2.11",
    ):
        assert tuple(row.split()) in rows, row
    # What has no value is left out.
    assert not any("truncation" in row for row in rows)


def test_a_store_without_look_ups_has_no_rates() -> None:
    usage = {"looked_up": 0, "damaged": 0, "hit_rate": None, "hit_rates": {"device": None, "host": 0.25}}
    presets = [{"preset": "turbo3", "contexts": 2, "bytes": 2048}]
    named = {"kind": "context_store", "model": None, "precision": None}
    result = named | {"contexts": 2, "bytes": 2048, "usage": usage, "presets": presets}
    rows = {tuple(line.split()) for line in text_of(*info_report(result)).splitlines()}
    for row in ("model none yet", "bytes 2.0 KiB", "hits -", "hits host 25.0 %", "│ turbo3 │ 2 │ 2.0 KiB │"):
        assert tuple(row.split()) in rows, row


def sizes(count: float, bits: float, ratio: float) -> dict[str, float]:
    return {"bytes": count, "bits_per_element": bits, "ratio_to_fp32": ratio}
