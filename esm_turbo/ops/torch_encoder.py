"""Plain PyTorch operations of the packed encoders, for any device: the reference of `triton_encoder`.

Tokens of all rows are packed along one dimension, T in all, without padding.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["add_layer_norm", "attend", "gelu_", "linear", "linear_parts", "norm_rotate_", "rotate_", "swiglu"]


def add_layer_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum x + delta and its layer norm.

    Args:
        x: [T, hidden_size].
        delta: likewise, or parts to be summed, float32 [P, T, hidden_size]; None for the layer norm of x alone.
        weight: [hidden_size].
        bias: [hidden_size].
        eps: added to the variance.

    Returns:
        The sum, which is x itself without a delta, and its layer norm, both [T, hidden_size] in the dtype of x.
    """
    if delta is not None:
        x = x + delta if delta.dim() == 2 else (x.float() + delta.sum(0)).to(x.dtype)
    return x, functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor, activates: bool = False) -> Tensor:
    """The linear layer x W^T + b, or its GELU.

    Args:
        x: [T, inputs].
        weight: [outputs, inputs].
        bias: [outputs].
        activates: whether the activation follows, see `gelu_`.

    Returns:
        [T, outputs], in the dtype of x.
    """
    outputs = functional.linear(x, weight, bias)
    if activates:
        gelu_(outputs)
    return outputs


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The linear layer as a delta of `add_layer_norm`: [T, outputs], or parts of its sum, float32 [P, T, outputs]."""
    return functional.linear(x, weight, bias)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, scale: float) -> None:
    """Scales queries, and rotates queries and keys (RoPE, Su et al. 2021), in place and in float32.

    Args:
        qkv: [T, 3, heads, head_dim], contiguous.
        cos: of the angles of every token, float32 [T, head_dim / 2].
        sin: likewise.
        scale: of the queries.
    """
    cos, sin = (torch.stack([x * scale, x], dim=1)[:, :, None] for x in (cos, sin))
    low, high = qkv[:, :2].float().chunk(2, dim=-1)
    qkv[:, :2] = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(qkv.dtype)


def norm_rotate_(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, scale: float
) -> None:
    """Layer norm of queries and of keys over all heads, without bias, then `rotate_`; in place and in float32.

    Args:
        qkv: [T, 3, heads, head_dim], contiguous.
        query_weight: [heads * head_dim].
        key_weight: likewise.
        eps: added to the variance.
        cos: as in `rotate_`.
        sin: likewise.
        scale: of the queries.
    """
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
    """The gated activation silu(gate) up (Shazeer 2020) of gate and up, [T, 2 * size], as [T, size]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_(x: Tensor) -> None:
    """The activation x / 2 (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel 2016), in place."""
    x.copy_(functional.gelu(x.float()))


def attend(qkv: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Attention of every row's tokens to each other.

    Args:
        qkv: after scaling and rotation, [T, 3, heads, head_dim].
        offsets: of every row's first token, and T, int32 [rows + 1].
        longest: tokens of the longest row.

    Returns:
        [T, heads, head_dim].
    """
    output = torch.empty_like(qkv[:, 0])
    bounds = offsets.tolist()
    for start, end in pairwise(bounds):
        query, keys, values = (x.transpose(0, 1)[None] for x in qkv[start:end].unbind(1))
        attended = functional.scaled_dot_product_attention(query, keys, values, scale=1.0)
        output[start:end] = attended[0].transpose(0, 1)
    return output
