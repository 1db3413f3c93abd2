"""`esm-turbo warmup`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from esm_turbo.cli.console import show
from esm_turbo.cli.inputs import load_model
from esm_turbo.cli.options import READS, CacheOptions, JsonFile


def warmup(
    checkpoint: Annotated[str | None, READS] = None, /, *, json: JsonFile = None, model: CacheOptions = CacheOptions()
) -> None:
    """Compile the GPU kernels of a model ahead of its first call; once on a machine for each dtype and preset.

    Args:
        checkpoint: Hub id or folder of an ESM-2, ESM-C or E1 checkpoint, instead of --model.
    """
    if checkpoint is not None and model.model is not None:
        raise ValueError("give the model once: as the argument, or by --model")
    turbo = load_model(model if checkpoint is None else replace(model, model=checkpoint))
    count = turbo.warmup()
    device, preset = turbo.model.device, turbo.model.base_model.turbo_config.name
    show(
        f"{count} GPU kernels are compiled for {turbo.name} in {turbo.model.dtype}, preset {preset}"
        if count
        else f"nothing to compile: the model is on {device}, and uses no GPU kernels there",
        to_json=json,
        result={"kernels": count, "device": str(device), "dtype": str(turbo.model.dtype), "preset": preset},
    )
