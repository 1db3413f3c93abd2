"""`esm-turbo warmup`."""

import json

from esm_turbo.modeling_esm_turbo import TurboEsmModel


def test_nothing_is_compiled_on_a_cpu(esm, tiny_folder):
    result = esm("warmup", tiny_folder, "--preset", "exact", "--device", "cpu")
    assert (result.code, result.err) == (0, "")
    assert result.out.strip() == "nothing to compile: the model is on cpu, and uses no GPU kernels there"


def test_the_number_of_kernels_is_reported(esm, tiny_folder, monkeypatch):
    monkeypatch.setattr(TurboEsmModel, "warmup", lambda self: 17)
    result = esm("warmup", "--model", tiny_folder, "--preset", "exact", "--device", "cpu", "--json=-")
    assert json.loads(result.out) == {"kernels": 17, "device": "cpu", "dtype": "torch.float32", "preset": "exact"}


def test_a_model_is_given_once(esm, tiny_folder):
    result = esm("warmup", tiny_folder, "--model", tiny_folder)
    assert result.code == 2
    assert "give the model once" in result.err


def test_a_preset_needs_its_calibration(esm, tiny_folder):
    result = esm("warmup", tiny_folder, "--device", "cpu")
    assert result.code == 2
    assert "needs a calibration of this model" in result.err
