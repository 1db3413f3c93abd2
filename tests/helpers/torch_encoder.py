"""Reference of `esm_turbo.ops.triton_encoder`: plain PyTorch operations of packed encoders, on any device.

Tokens of all rows are packed along one dimension, T in all, without padding.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from esm_turbo.ops import float8, reference
from esm_turbo.ops.float8 import Quantized
from esm_turbo.ops.triton_encoder import SeenKeys

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attend",
    "gelu_",
    "linear",
    "linear_parts",
    "norm_rotate_",
    "quantize",
    "rotate_",
    "swiglu",
]


def add_layer_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    factor: float = 1.0,
    quantizes: bool = False,
) -> tuple[Tensor, Any]:
    """See `triton_encoder.add_layer_norm`."""
    if delta is not None:
        delta = delta.float() if delta.dim() == 2 else delta.sum(0)
        x = (x.float() + factor * delta).to(x.dtype)
    normed = functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)
    return x, quantize(normed) if quantizes else normed


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `triton_encoder.add_rms_norm`."""
    x = x if delta is None else x + delta
    return x, functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def linear(
    x: Tensor | Quantized,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None = None,
    *,
    activates: bool = False,
    quantizes: bool = False,
) -> Any:
    """See `triton_encoder.linear`."""
    if scales is None:
        outputs = functional.linear(x, weight, bias)
    else:
        outputs = reference.float8_linear(quantize(x) if isinstance(x, Tensor) else x, weight, scales, bias)
    if activates:
        gelu_(outputs)
    return quantize(outputs) if quantizes else outputs


def linear_parts(x: Tensor | Quantized, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """See `triton_encoder.linear_parts`."""
    return linear(x, weight, bias, scales)


def quantize(x: Tensor, activation: Literal["gelu", "swiglu"] | None = None) -> Quantized:
    """See `triton_encoder.quantize`."""
    if activation == "gelu":
        x = x.clone()
        gelu_(x)
    return float8.quantize(swiglu(x) if activation == "swiglu" else x)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, scale: float, clip: float = math.inf) -> None:
    """See `triton_encoder.rotate_`."""
    qkv.clamp_(-clip, clip)
    cos, sin = (torch.stack([x * scale, x], dim=1)[:, :, None] for x in (cos, sin))
    low, high = qkv[:, :2].float().chunk(2, dim=-1)
    qkv[:, :2] = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(qkv.dtype)


def norm_rotate_(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, scale: float
) -> None:
    """See `triton_encoder.norm_rotate_`."""
    normed = qkv[:, :2].float()
    for index, weight in enumerate((query_weight, key_weight)):
        flat = normed[:, index].flatten(1)
        normed[:, index] = functional.layer_norm(flat, weight.shape, weight.float(), None, eps).view_as(
            normed[:, index]
        )
    rotated = torch.cat([normed, normed[:, :1]], dim=1)
    rotate_(rotated, cos, sin, scale)
    qkv[:, :2] = rotated[:, :2].to(qkv.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `triton_encoder.swiglu`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_(x: Tensor) -> None:
    """See `triton_encoder.gelu_`."""
    x.copy_(functional.gelu(x.float()))


def attend(qkv: Tensor, offsets: Tensor, longest: int, seen: SeenKeys | None = None) -> Tensor:
    """See `triton_encoder.attend`."""
    output = torch.empty_like(qkv[:, 0])
    bounds = offsets.tolist()
    firsts, counts = (bounds, offsets.diff().tolist()) if seen is None else (seen.firsts.tolist(), seen.counts.tolist())
    for start, end, first, count in zip(bounds, bounds[1:], firsts, counts, strict=False):
        query, keys, values = (x.transpose(0, 1)[None] for x in qkv.unbind(1))
        own, past = slice(start, end), slice(first, first + count)
        attended = functional.scaled_dot_product_attention(
            query[:, :, own], keys[:, :, past], values[:, :, past], scale=1.0
        )
        output[own] = attended[0].transpose(0, 1)
    return output
