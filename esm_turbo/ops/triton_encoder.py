"""Operations of the packed encoders on CUDA: Triton kernels, and PyTorch's flash attention.

triton is imported when a kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.ops.triton_launch import Options, launch
from esm_turbo.ops.triton_layout import next_power_of_two

__all__ = ["add_layer_norm", "attend", "gelu_", "norm_rotate_", "rotate_", "swiglu"]

# Elements per program of the activations.
_BLOCK = 2048


def add_layer_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `torch_encoder.add_layer_norm`; one launch."""
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, size = x.shape
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    block = next_power_of_two(size)
    launch(
        kernels.add_layer_norm,
        (tokens, 1, 1),
        x.device,
        Options(num_warps=min(8, max(1, block // 256))),
        x_ptr=x,
        delta_ptr=x if delta is None else delta,
        weight_ptr=weight,
        bias_ptr=bias,
        sum_ptr=total,
        normed_ptr=normed,
        eps=eps,
        adds=int(delta is not None),
        SIZE=size,
        BLOCK=block,
    )
    return total, normed


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, scale: float) -> None:
    """See `torch_encoder.rotate_`; one launch."""
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, _, heads, head_dim = qkv.shape
    launch(
        kernels.rotate_,
        (tokens, 1, 1),
        qkv.device,
        Options(num_warps=4),
        qkv_ptr=qkv,
        cos_ptr=cos,
        sin_ptr=sin,
        scale=scale,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEADS_BLOCK=next_power_of_two(2 * heads),
        HALF_BLOCK=next_power_of_two(head_dim // 2),
    )


def norm_rotate_(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, scale: float
) -> None:
    """See `torch_encoder.norm_rotate_`; one launch."""
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, _, heads, head_dim = qkv.shape
    launch(
        kernels.norm_rotate_,
        (tokens, 2, 1),
        qkv.device,
        Options(num_warps=4),
        qkv_ptr=qkv,
        query_weight_ptr=query_weight,
        key_weight_ptr=key_weight,
        cos_ptr=cos,
        sin_ptr=sin,
        eps=eps,
        scale=scale,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEADS_BLOCK=next_power_of_two(heads),
        HALF_BLOCK=next_power_of_two(head_dim // 2),
    )


def swiglu(gate_up: Tensor) -> Tensor:
    """See `torch_encoder.swiglu`; one launch."""
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    activated = gate_up.new_empty(tokens, size)
    launch(
        kernels.swiglu,
        (-(-activated.numel() // _BLOCK), 1, 1),
        gate_up.device,
        Options(num_warps=4),
        gate_up_ptr=gate_up,
        out_ptr=activated,
        count=activated.numel(),
        size=size,
        BLOCK=_BLOCK,
    )
    return activated


def gelu_(x: Tensor) -> None:
    """See `torch_encoder.gelu_`; one launch."""
    from esm_turbo.ops.kernels import encoder as kernels

    launch(
        kernels.gelu_,
        (-(-x.numel() // _BLOCK), 1, 1),
        x.device,
        Options(num_warps=4),
        x_ptr=x,
        count=x.numel(),
        BLOCK=_BLOCK,
    )


def attend(qkv: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """See `torch_encoder.attend`; one launch.

    Flash attention (Dao 2023), as `torch.nn.attention.varlen` calls it, at less cost for the host.
    """
    query, keys, values = qkv.unbind(1)
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, offsets, offsets, longest, longest, 0.0, False, False, scale=1.0
    )[0]
    return output
