"""Models of random weights on a CUDA device with calibrations on random proteins; built once per process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import cuda_timing
from benchmarks.harness.models import Architecture, random_calibration, random_model, random_tokens
from esm_turbo import Calibration
from esm_turbo.files.families import FAMILIES


@functools.lru_cache(maxsize=1)
def calibrated(architecture: Architecture) -> tuple[Any, Calibration]:
    """A model in bfloat16 on the device, and its calibration made in float32."""
    model = random_model(architecture, device=cuda_timing.DEVICE)
    calibration = random_calibration(model, [])
    turbo = _class_of(model).from_esm(model, calibration=calibration)
    # Rotary frequencies stay in float32 in our class; the weights are shared.
    turbo.to(torch.bfloat16)
    return model, calibration


def tokens(rows: int, residues: int, **options: Any) -> Tensor:
    """`random_tokens` on the device."""
    return random_tokens(rows, residues, **options).to(cuda_timing.DEVICE)


def presets_of(architecture: Architecture, presets: Sequence[str], backend: str = "auto") -> dict[str, Any]:
    """One model per preset, bfloat16, all sharing their weights; what runs eagerly is not captured by itself."""
    model, calibration = calibrated(architecture)
    models = {}
    for preset in presets:
        models[preset] = _class_of(model).from_esm(model, calibration=calibration, preset=preset, backend=backend)
        models[preset].captures = False
    return models


def _class_of(model: Any) -> Any:
    family = FAMILIES[model.config.model_type]
    return family.load(family.model)
