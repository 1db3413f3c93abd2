"""Operations of the packed encoders on CUDA: Triton kernels, and PyTorch's flash attention.

triton is imported when a kernel runs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from esm_turbo.ops.triton_launch import Options, PreparedLaunch
from esm_turbo.ops.triton_layout import next_power_of_two

__all__ = ["add_layer_norm", "attend", "gelu_", "norm_rotate_", "rotate_", "swiglu"]

# Elements per program of the activations.
_BLOCK = 2048
# The layers of a model share their launches.
_by_shape = functools.lru_cache(maxsize=256)


def add_layer_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `torch_encoder.add_layer_norm`; one launch."""
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    _add_layer_norm(x.shape, x.device, eps, delta is not None)(
        x_ptr=x,
        delta_ptr=x if delta is None else delta,
        weight_ptr=weight,
        bias_ptr=bias,
        sum_ptr=total,
        normed_ptr=normed,
    )
    return total, normed


@_by_shape
def _add_layer_norm(shape: torch.Size, device: torch.device, eps: float, adds: bool) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, size = shape
    block = next_power_of_two(size)
    warps = min(8, max(1, block // 256))
    numbers = {"eps": eps, "adds": int(adds), "SIZE": size, "BLOCK": block}
    return PreparedLaunch(kernels.add_layer_norm, (tokens, 1, 1), device, Options(warps), **numbers)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, scale: float) -> None:
    """See `torch_encoder.rotate_`; one launch."""
    _rotate_(qkv.shape, qkv.device, scale)(qkv_ptr=qkv, cos_ptr=cos, sin_ptr=sin)


@_by_shape
def _rotate_(shape: torch.Size, device: torch.device, scale: float) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, _, heads, head_dim = shape
    return PreparedLaunch(
        kernels.rotate_,
        (tokens, 1, 1),
        device,
        Options(num_warps=4),
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
    _norm_rotate_(qkv.shape, qkv.device, eps, scale)(
        qkv_ptr=qkv, query_weight_ptr=query_weight, key_weight_ptr=key_weight, cos_ptr=cos, sin_ptr=sin
    )


@_by_shape
def _norm_rotate_(shape: torch.Size, device: torch.device, eps: float, scale: float) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, _, heads, head_dim = shape
    return PreparedLaunch(
        kernels.norm_rotate_,
        (tokens, 2, 1),
        device,
        Options(num_warps=4),
        eps=eps,
        scale=scale,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEADS_BLOCK=next_power_of_two(heads),
        HALF_BLOCK=next_power_of_two(head_dim // 2),
    )


def swiglu(gate_up: Tensor) -> Tensor:
    """See `torch_encoder.swiglu`; one launch."""
    activated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _swiglu(activated.shape, activated.device)(gate_up_ptr=gate_up, out_ptr=activated)
    return activated


@_by_shape
def _swiglu(shape: torch.Size, device: torch.device) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    numbers = {"count": shape.numel(), "size": shape[1], "BLOCK": _BLOCK}
    grid = (-(-shape.numel() // _BLOCK), 1, 1)
    return PreparedLaunch(kernels.swiglu, grid, device, Options(num_warps=4), **numbers)


def gelu_(x: Tensor) -> None:
    """See `torch_encoder.gelu_`; one launch."""
    _gelu_(x.shape, x.device)(x_ptr=x)


@_by_shape
def _gelu_(shape: torch.Size, device: torch.device) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    grid = (-(-shape.numel() // _BLOCK), 1, 1)
    return PreparedLaunch(kernels.gelu_, grid, device, Options(num_warps=4), count=shape.numel(), BLOCK=_BLOCK)


def attend(qkv: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """See `torch_encoder.attend`; one launch.

    Flash attention (Dao 2023), as `torch.nn.attention.varlen` calls it, at less cost for the host.
    """
    query, keys, values = qkv.unbind(1)
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, offsets, offsets, longest, longest, 0.0, False, False, scale=1.0
    )[0]
    return output
