"""`esm-turbo info`: models, artifacts, embeddings and the environment."""

import json

import pytest
import torch

from esm_turbo import TurboEsm
from tests.helpers.command_inputs import altered, other_version, truncated


def test_info_of_a_model(esm, tiny_folder, tiny_calibration, tiny):
    result = esm("info", tiny_folder, "--length", "11", "--batch", "3", "--json=-")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["geometry"] == {"num_layers": 2, "num_heads": 4, "head_dim": 16}
    assert found["model"] == "tiny"
    assert not found["calibrated"]
    sizes = found["cache"]["presets"]
    assert sizes["fp32"]["bytes"] == 3 * 11 * 2 * 2 * 4 * 16 * 4
    assert sizes["exact"]["bytes"] == 3 * tiny.prefill("MKTAYIAKQR").nbytes
    calibrated = esm("info", tiny_folder, "--calibration", tiny_calibration(seed=0), "--length", "11", "--json", "-")
    found = json.loads(calibrated.out)
    assert found["calibrated"]
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=tiny_calibration(seed=0))
    for preset, size in found["cache"]["presets"].items():
        if not preset.startswith("fp"):
            turbo.model.set_turbo(calibration=turbo.calibration, preset=preset)
            # The prediction without a calibration was the same.
            assert size["bytes"] == turbo.prefill("MKTAYIAKQR").nbytes == sizes[preset]["bytes"] / 3
    assert "geometry" in esm("info", tiny_folder).out


def test_info_of_artifacts(esm, tmp_path, tiny_calibration, tiny):
    calibration = json.loads(esm("info", tiny_calibration(seed=0), "--json", "-").out)
    assert calibration["kind"] == "calibration"
    assert calibration["provenance"]["residues"] == 100
    cache = tiny.prefill(["MKTAYIAKQR", "MKT"])
    cache.save(tmp_path / "cache.safetensors")
    found = json.loads(esm("info", tmp_path / "cache.safetensors", "--json", "-").out)
    assert (found["kind"], found["lengths"], found["bytes"]) == ("cache", [11, 4], cache.nbytes)
    assert found["preset"] == "exact"
    for path in (tiny_calibration(seed=0), tmp_path / "cache.safetensors"):
        result = esm("info", path)
        assert (result.code, result.err) == (0, "")
        assert "2 layers x 4 heads x 16" in result.out


def test_info_of_embeddings(esm, tmp_path, tiny_folder):
    fasta, folder = tmp_path / "a.fasta", tmp_path / "embeddings"
    fasta.write_text(">a\nMKT\n>b\nMKTAYI\n")
    assert esm("embed", fasta, folder, "--model", tiny_folder, "--include", "mean").code == 0
    found = json.loads(esm("info", folder, "--json", "-").out)
    assert (found["kind"], found["proteins"], found["model"]) == ("embeddings", 2, "tiny")
    assert (found["include"], found["format"]) == (["mean"], "pt")
    assert "proteins" in esm("info", folder).out
    (folder / "settings.json").write_text("[1, 2]")
    result = esm("info", folder)
    assert result.code == 2
    assert "damaged" in result.error


@pytest.mark.parametrize("damage", [truncated, altered, other_version])
def test_info_refuses_a_damaged_cache(esm, tmp_path, tiny, damage):
    path = tmp_path / "cache.safetensors"
    tiny.prefill("MKTAYIAKQR" * 5).save(path)
    damage(path)
    result = esm("info", path)
    assert result.code == 2
    assert str(path) in result.error


def test_info_of_the_environment(esm):
    result = esm("info", "--json", "-")
    found = json.loads(result.out)
    assert found["environment"]["torch"] == torch.__version__
    assert found["model"] == "esm2-mini"
    assert "transformers" in esm("info").out
