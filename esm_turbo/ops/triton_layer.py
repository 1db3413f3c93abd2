"""RoPE and the activation of an extension by Triton kernels. Imports triton only when it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.ops.triton_layout import power_of_two

__all__ = ["gelu", "rotate"]

# Elements and heads of a program.
_BLOCK = 1024
_HEADS = 8
# Programmatic dependent launch: where it may be used, and from which compute capability on there is one.
OVERLAP = True
_OVERLAPPING = (9, 0)


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `torch_ops.rotate`; one launch."""
    rotated: tuple[Tensor, Tensor] = torch.ops.esm_turbo.rotate(query, keys, cos, sin, scale)
    return rotated


def gelu(x: Tensor) -> Tensor:
    """See `torch_ops.gelu`; one launch."""
    activated: Tensor = torch.ops.esm_turbo.gelu(x)
    return activated


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin before the one that it depends on has ended, up to where it waits for it."""
    return OVERLAP and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OVERLAPPING


def settle(device: torch.device) -> None:
    """Makes sure that what was just written is there for kernels that begin early: one that does not stands between."""
    if overlaps(device):
        torch.zeros(1, device=device)


def like_tokens(x: Tensor) -> Tensor:
    """Room for something like x [B, H, n, D] that lies token by token, as linear layers give and take it."""
    batch_size, heads, n, head_dim = x.shape
    return torch.empty(batch_size, n, heads, head_dim, dtype=x.dtype, device=x.device).transpose(1, 2)


@torch.library.custom_op("esm_turbo::rotate", mutates_args=())
def _rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from esm_turbo.ops.kernels import layer as kernels

    batch_size, heads, n, head_dim = query.shape
    query, keys, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, cos, sin))
    cos, sin = cos.expand(batch_size, -1, -1), sin.expand(batch_size, -1, -1)
    if sin.stride() != cos.stride():
        sin = sin.contiguous()
        cos = cos.contiguous()
    new_query, new_keys = like_tokens(query), like_tokens(keys)
    kernels.rotate[n, -(-heads // _HEADS), batch_size](
        query,
        keys,
        cos,
        sin,
        new_query,
        new_keys,
        scale,
        *query.stride()[:3],
        *keys.stride()[:3],
        *cos.stride()[:2],
        heads,
        n,
        HEAD_DIM=head_dim,
        HALF=power_of_two(head_dim // 2),
        HEADS=_HEADS,
        OVERLAP=overlaps(query.device),
        num_warps=4,
    )
    return new_query, new_keys


@_rotate.register_fake
def _(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return like_tokens(query), like_tokens(keys)


@torch.library.custom_op("esm_turbo::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    from esm_turbo.ops.kernels import layer as kernels

    x = x.contiguous()
    activated = torch.empty_like(x)
    kernels.gelu[(-(-x.numel() // _BLOCK),)](x, activated, x.numel(), BLOCK=_BLOCK, num_warps=4)
    return activated


@_gelu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)
