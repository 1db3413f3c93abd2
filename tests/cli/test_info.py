"""Descriptions of artifacts, and sizes of caches computed without storing any."""

import pytest

from esm_turbo import Calibration, TurboEsm
from esm_turbo.cli.info import cache_sizes, file_info, model_info, stored_bytes
from esm_turbo.config import PRESETS, PRODUCT_PRESETS, Geometry
from esm_turbo.files.artifacts import ArtifactError
from tests.helpers.command_inputs import other_kind

GEOMETRY = Geometry(num_layers=2, num_heads=4, head_dim=16)


def test_bytes_of_long_proteins_are_extrapolated(tiny_folder, tiny_calibration):
    calibration = Calibration.load(tiny_calibration(seed=0))
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=calibration)
    for preset in PRESETS:
        turbo.model.set_turbo(calibration=calibration, preset=preset)
        for length in (127, 128, 191, 501):
            assert stored_bytes(calibration.codec(preset), length) == turbo.prefill("M" * (length - 1)).nbytes


def test_sizes_without_a_calibration_equal_those_with_one(tiny_calibration):
    calibration = Calibration.load(tiny_calibration(seed=0))
    found = cache_sizes(GEOMETRY, None, 200, 3)
    assert found == cache_sizes(GEOMETRY, calibration, 200, 3)
    assert (found["tokens"], found["batch_size"]) == (200, 3)
    assert list(found["presets"]) == ["fp32", "fp16", *PRODUCT_PRESETS]
    assert found["presets"]["fp16"] == {"bytes": 2 * 3 * 200 * 256, "bits_per_element": 16.0, "ratio_to_fp32": 2.0}


@pytest.mark.parametrize(("length", "batch_size"), [(0, 1), (1, 0)])
def test_sizes_of_nothing_are_refused(length, batch_size):
    with pytest.raises(ValueError, match=f"at least 1, got {length} and {batch_size}"):
        cache_sizes(GEOMETRY, None, length, batch_size)


def test_the_calibration_in_a_models_folder_is_found(tiny_folder, tiny_calibration, tmp_path):
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=tiny_calibration(seed=0))
    turbo.save_pretrained(tmp_path / "calibrated")
    assert model_info(tmp_path / "calibrated")["calibrated"]
    assert not model_info(tiny_folder)["calibrated"]
    assert model_info(tiny_folder, tiny_calibration(seed=0))["calibrated"]
    with pytest.raises(ValueError, match="give this model's own"):
        model_info(tiny_folder, tiny_calibration(seed=0, layers=3))


def test_files_of_other_programs_are_refused(tmp_path):
    other_kind(tmp_path / "x")
    with pytest.raises(ArtifactError, match="is not a calibration, cache or embedding of esm_turbo"):
        file_info(tmp_path / "x")
