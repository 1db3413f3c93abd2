"""Models of a CUDA device, built on the CPU here."""

from __future__ import annotations

import torch

from benchmarks.harness import gpu_models
from tests.helpers.benchmark_cases import TINY


def test_presets_share_one_model_in_bfloat16(no_device: None) -> None:
    models = gpu_models.presets_of(TINY, ["exact", "turbo3"])
    plain, calibration = gpu_models.calibrated(TINY)
    assert {name: model.turbo_config.name for name, model in models.items()} == {"exact": "exact", "turbo3": "turbo3"}
    weight = plain.embeddings.word_embeddings.weight
    assert weight.dtype == torch.bfloat16
    assert all(model.embeddings.word_embeddings.weight.data_ptr() == weight.data_ptr() for model in models.values())
    assert all(model.calibration is calibration for model in models.values())
