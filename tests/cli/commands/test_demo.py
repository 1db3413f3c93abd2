"""`esm-turbo demo`."""

import json
import os

from esm_turbo.cli import demo
from esm_turbo.config import PRESETS


def test_demo(esm, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CALIBRATION_PROTEINS", 4)
    monkeypatch.setattr(demo, "EVALUATION_PROTEINS", 1)
    monkeypatch.setattr(demo, "PRODUCT_PRESETS", {name: PRESETS[name] for name in ("exact", "paper")})
    monkeypatch.chdir(tmp_path)
    result = esm("demo", "--json", "demo.json")
    assert (result.code, result.err) == (0, "")
    assert "Figures of the embedded small model, not of Meta's ESM-2" in result.out
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["calibration"]["proteins"] == 4
    example = found["example"]
    assert example["new"] == 8 and 0 <= example["top1"] <= 8
    assert 0.9 < example["cosine"] <= 1
    assert list(found["seconds"]) == ["load", "calibrate", "prefill and extend", "compare"]
    # Three of 32 bits per element, and the overhead of a short context.
    elements = 2 * 12 * 256 * (example["context"] + 1)
    assert 3 * elements / 8 < example["nbytes"] < elements
    presets = [preset["name"] for preset in found["evaluation"]["presets"]]
    assert presets == ["exact", "paper"]
    assert all(name in result.out for name in presets)
    # The demo leaves nothing behind.
    assert os.listdir(tmp_path) == ["demo.json"]
