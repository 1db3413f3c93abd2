"""Copies between the host and a device that wait for nothing: the device may be busy with what was launched before."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. From the host it is copied out of pinned memory; a plain copy would wait for the device."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


def to_host(x: Tensor) -> Tensor:
    """A tensor on the host. From a CUDA device it is copied into pinned memory; wait for the device to read it."""
    if x.device.type != "cuda":
        return x.to("cpu")
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
