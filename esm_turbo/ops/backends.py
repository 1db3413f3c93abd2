"""Chooses the implementation of the packed attention."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import torch

from esm_turbo.config import Backend
from esm_turbo.ops import reference, torch_ops
from esm_turbo.ops import triton_attention as triton_kernels

# Looked up, not imported: only a kernel that runs may cost the import of triton.
_TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None
# The first NVIDIA generation that Triton compiles for.
_OLDEST_CAPABILITY = 8


def resolve_backend(backend: str | Backend, device: torch.device | str) -> ModuleType:
    """The module whose `extend_attention` runs on a device.

    Args:
        backend: `auto`, `triton`, `torch` or `reference`; only `auto` falls back. `triton` also runs on the CPU where
            the environment says `TRITON_INTERPRET=1`: slowly, for tests.
        device: where the model is.

    Raises:
        ValueError: there is no such backend, or it cannot run here.
    """
    try:
        backend = Backend(backend)
    except ValueError:
        raise ValueError(f"`backend` must be one of {[b.value for b in Backend]}, got {backend!r}") from None
    device = torch.device(device)
    if backend is Backend.REFERENCE:
        if device.type != "cpu":
            raise ValueError(f"backend 'reference' runs on the CPU only, the model is on {device}")
        return reference
    if backend is Backend.AUTO and device.type == "cuda" and _obstacle(device) is None:
        return triton_kernels
    if backend is Backend.TRITON:
        obstacle = _obstacle(device)
        if obstacle is not None:
            raise ValueError(f"backend 'triton' cannot run: {obstacle}; use 'auto' or 'torch'")
        return triton_kernels
    return torch_ops


def _obstacle(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device; None where they can."""
    if not _TRITON_IS_INSTALLED:
        return "triton is not installed (pip install 'esm-turbo[triton]')"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, the model is on {device}"
    properties = torch.cuda.get_device_properties(device)
    if properties.major < _OLDEST_CAPABILITY:
        found = f"{properties.major}.{properties.minor}"
        return f"it needs an NVIDIA GPU of compute capability {_OLDEST_CAPABILITY}.0 or newer, {device} has {found}"
    return None
