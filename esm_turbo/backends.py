"""Chooses the implementation of the packed attention."""

from __future__ import annotations

from types import ModuleType

import torch

from . import reference, torch_ops, triton_kernels
from .config import Backend


def resolve_backend(backend: str | Backend, device: torch.device | str) -> ModuleType:
    """The module whose `extend_attention` runs on a device.

    Args:
        backend: `auto`, `triton`, `torch` or `reference`; only `auto` falls back.
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
    if backend is Backend.TRITON and "extend_attention" not in triton_kernels.__all__:
        raise ValueError("backend 'triton' cannot run: this release has no Triton kernels; use 'auto' or 'torch'")
    return torch_ops
