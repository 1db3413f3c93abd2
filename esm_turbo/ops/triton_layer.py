"""RoPE and GELU of an extension by Triton kernels. Imports triton only when a kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.ops.triton_launch import Options, empty_by_token, launch, operator, overlaps, strides
from esm_turbo.ops.triton_layout import next_power_of_two

__all__ = ["gelu", "rotate"]

# Elements and heads per program.
_BLOCK = 1024
_HEADS = 8


@operator("rotate", lambda query, keys, *_: (empty_by_token(query), empty_by_token(keys)))
def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys after RoPE, see `torch_ops.rotate`; one launch."""
    from esm_turbo.ops.kernels import layer as kernels

    batch_size, heads, n, head_dim = query.shape
    query, keys, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, cos, sin))
    cos, sin = cos.expand(batch_size, -1, -1), sin.expand(batch_size, -1, -1)
    if sin.stride() != cos.stride():
        sin = sin.contiguous()
        cos = cos.contiguous()
    new_query, new_keys = empty_by_token(query), empty_by_token(keys)
    launch(
        kernels.rotate,
        (n, -(-heads // _HEADS), batch_size),
        query.device,
        Options(num_warps=4),
        query_ptr=query,
        key_ptr=keys,
        cos_ptr=cos,
        sin_ptr=sin,
        new_query_ptr=new_query,
        new_key_ptr=new_keys,
        scale=scale,
        **strides(q=query, k=keys),
        cos_stride_b=cos.stride(0),
        cos_stride_n=cos.stride(1),
        num_heads=heads,
        num_tokens=n,
        HEAD_DIM=head_dim,
        HALF=next_power_of_two(head_dim // 2),
        HEADS=_HEADS,
        OVERLAP=overlaps(query.device),
    )
    return new_query, new_keys


@operator("gelu", lambda x: x.new_empty(x.shape))
def gelu(x: Tensor) -> Tensor:
    """The model's activation, see `torch_ops.gelu`; one launch."""
    from esm_turbo.ops.kernels import layer as kernels

    x = x.contiguous()
    activated = torch.empty_like(x)
    launch(
        kernels.gelu,
        (-(-x.numel() // _BLOCK), 1, 1),
        x.device,
        Options(num_warps=4),
        x_ptr=x,
        out_ptr=activated,
        numel=x.numel(),
        BLOCK=_BLOCK,
    )
    return activated
