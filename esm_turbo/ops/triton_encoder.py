"""Operations of the packed encoders on CUDA: Triton kernels, and PyTorch's flash attention.

triton is imported when a kernel runs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from esm_turbo.ops.float8 import DTYPE as CODES
from esm_turbo.ops.float8 import Quantized, float8_linear
from esm_turbo.ops.triton_launch import Options, PreparedLaunch, overlaps, placeholder
from esm_turbo.ops.triton_layout import next_power_of_two

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

# Elements per program of the activations.
_BLOCK = 2048
# Rows of more numbers are quantised by more warps, so that they fit their registers.
_LONG_ROW = 8192
# Norms of longer rows of many tokens take half the time with few warps; one token waits less with more.
_MANY_TOKENS, _LONG_NORM = 1024, 4096
# Linear layers of at most so many tokens are computed by the kernel that is made for few.
FEW_TOKENS = 16
# Outputs per program of that kernel.
_OUTPUTS = 16
# Warps of a program, in order of preference, and how often each loads 32 inputs at most: more would need more registers
# than there are.
_WARPS = (4, 8, 2)
_CHUNKS = 10
# Parts of a sum that `add_layer_norm` adds up.
_MOST_PARTS = 4
# The layers of a model share their launches.
_by_shape = functools.lru_cache(maxsize=256)


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
    """The residual sum x + factor * delta and its layer norm; one launch.

    Args:
        x: [T, hidden_size].
        delta: likewise, or parts to be summed, float32 [P, T, hidden_size]; None for the layer norm of x alone.
        weight: [hidden_size].
        bias: [hidden_size].
        eps: added to the variance.
        factor: of the delta.
        quantizes: whether the norm is for an eight-bit product.

    Returns:
        The sum, which is x itself without a delta, and its layer norm, both [T, hidden_size] in the dtype of x; or its
        layer norm as `float8.quantize` rounds it.
    """
    return _add_norm(x, delta, weight, bias, eps, factor, quantizes)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `add_layer_norm`, with the root mean square norm (Zhang and Sennrich 2019), which has no mean and no bias."""
    return _add_norm(x, delta, weight, None, eps)


def _add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    factor: float = 1.0,
    quantizes: bool = False,
) -> tuple[Tensor, Any]:
    normed = torch.empty_like(x, dtype=CODES) if quantizes else torch.empty_like(x)
    scales = x.new_empty(len(x), 1, dtype=torch.float32) if quantizes else None
    total = x if delta is None else torch.empty_like(x)
    num_parts = 0 if delta is None or delta.dim() == 2 else len(delta)
    _add_layer_norm(x.shape, x.device, eps, factor, delta is not None, num_parts, bias is not None, quantizes)(
        x_ptr=x,
        delta_ptr=x if delta is None or num_parts else delta,
        parts_ptr=delta if num_parts else placeholder(torch.float32, x.device),
        weight_ptr=weight,
        bias_ptr=weight if bias is None else bias,
        sum_ptr=total,
        normed_ptr=normed,
        scales_ptr=scales,
    )
    return total, normed if scales is None else Quantized(normed, scales)


@_by_shape
def _add_layer_norm(
    shape: torch.Size,
    device: torch.device,
    eps: float,
    factor: float,
    adds: bool,
    num_parts: int,
    centres: bool,
    quantizes: bool,
) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, size = shape
    block = next_power_of_two(size)
    overlap = overlaps(device)
    absent = {} if quantizes else {"scales_ptr": None}
    warps = 2 if tokens > _MANY_TOKENS and size > _LONG_NORM else min(8, max(1, block // 256))
    return PreparedLaunch(
        kernels.add_layer_norm,
        (tokens, 1, 1),
        device,
        Options(warps, launch_pdl=overlap),
        **absent,
        eps=eps,
        factor=factor,
        adds=int(adds),
        num_parts=num_parts,
        centres=int(centres),
        SIZE=size,
        BLOCK=block,
        MOST_PARTS=_MOST_PARTS,
        OVERLAP=overlap,
    )


def linear(
    x: Tensor | Quantized,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None = None,
    *,
    activates: bool = False,
    quantizes: bool = False,
) -> Any:
    """The linear layer x W^T + b, or its GELU; one launch for few tokens.

    Args:
        x: [T, inputs]; of an eight-bit product, rounded or not.
        weight: [outputs, inputs].
        bias: [outputs], or None in an eight-bit product.
        scales: of an eight-bit product, see `float8.float8_linear`; None for any other.
        activates: whether the activation follows, see `gelu_`.
        quantizes: whether the activation is for an eight-bit product.

    Returns:
        [T, outputs], in the dtype of x; or as `float8.quantize` rounds it.
    """
    if scales is None:
        assert isinstance(x, Tensor) and bias is not None
        tiling = None if quantizes else _tiling_for(x, weight, bias, weight.shape[1])
        if tiling is not None:
            outputs = x.new_empty(len(x), len(weight))
            _linear(tiling, len(x), weight.shape, x.device, False, activates)(
                x_ptr=x,
                weight_ptr=weight,
                bias_ptr=bias,
                out_ptr=outputs,
                parts_ptr=placeholder(torch.float32, x.device),
            )
            return outputs
        outputs = functional.linear(x, weight, bias)
    else:
        outputs = float8_linear(quantize(x) if isinstance(x, Tensor) else x, weight, scales, bias)
    if quantizes:
        return quantize(outputs, "gelu" if activates else None)
    if activates:
        gelu_(outputs)
    return outputs


def linear_parts(x: Tensor | Quantized, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """The linear layer as a delta of `add_layer_norm`: [T, outputs], or parts of its sum, float32 [P, T, outputs].

    One launch for few tokens. See `linear`.
    """
    if scales is not None:
        delta: Tensor = linear(x, weight, bias, scales)
        return delta
    assert isinstance(x, Tensor) and bias is not None
    tiling = _tiling_for(x, weight, bias, len(weight))
    if tiling is None:
        return functional.linear(x, weight, bias)
    parts = x.new_empty(x.shape[1] // tiling.inputs, len(x), len(weight), dtype=torch.float32)
    _linear(tiling, len(x), weight.shape, x.device, True, False)(
        x_ptr=x, weight_ptr=weight, bias_ptr=bias, out_ptr=placeholder(x.dtype, x.device), parts_ptr=parts
    )
    return parts


class _Tiling(NamedTuple):
    """The tiling by which a program of `kernels.linear` takes `inputs` = 32 * warps * chunks."""

    warps: int
    chunks: int
    inputs: int


@functools.cache
def _tiling(size: int) -> _Tiling | None:
    """The tiling of `size` inputs; None if they cannot be divided evenly."""
    for warps in _WARPS:
        chunks, rest = divmod(size, 32 * warps)
        if not rest and chunks <= _CHUNKS:
            return _Tiling(warps, chunks, size)
    return None


def _tiling_for(x: Tensor, weight: Tensor, bias: Tensor, hidden_size: int) -> _Tiling | None:
    """The launch settings of a product with a weight; None where PyTorch should compute it.

    Programs take as many inputs as the model's hidden size, so that one kernel serves all products of a layer.
    """
    # Of no tokens, the kernel would read one.
    if not 0 < len(x) <= FEW_TOKENS:
        return None
    outputs, inputs = weight.shape
    tiling = _tiling(hidden_size)
    if tiling is None or outputs % _OUTPUTS or inputs % tiling.inputs or inputs > _MOST_PARTS * tiling.inputs:
        return None
    aligned = (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return tiling if aligned and x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous() else None


@_by_shape
def _linear(
    tiling: _Tiling, tokens: int, shape: torch.Size, device: torch.device, is_partial: bool, activates: bool
) -> PreparedLaunch:
    from esm_turbo.ops.kernels import linear as kernels

    outputs, inputs = shape
    overlap = overlaps(device)
    return PreparedLaunch(
        kernels.linear,
        (outputs // _OUTPUTS, inputs // tiling.inputs, 1),
        device,
        Options(tiling.warps, launch_pdl=overlap),
        stride_input=inputs,
        num_outputs=outputs,
        num_tokens=tokens,
        is_partial=int(is_partial),
        activates=int(activates),
        TOKENS=FEW_TOKENS,
        OUTPUTS=_OUTPUTS,
        CHUNKS=tiling.chunks,
        WARPS=tiling.warps,
        OVERLAP=overlap,
    )


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, scale: float, clip: float = math.inf) -> None:
    """Scales queries, and rotates queries and keys (RoPE, Su et al. 2021), in place and in float32; one launch.

    Before that, queries, keys and values are clamped to at most `clip` in magnitude.

    Args:
        qkv: [T, 3, heads, head_dim], contiguous.
        cos: of the angles of every token, float32 [T, head_dim / 2].
        sin: likewise.
        scale: of the queries.
        clip: positive; infinity clamps nothing.
    """
    _rotate_(qkv.shape, qkv.device, scale, clip)(qkv_ptr=qkv, cos_ptr=cos, sin_ptr=sin)


@_by_shape
def _rotate_(shape: torch.Size, device: torch.device, scale: float, clip: float) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, _, heads, head_dim = shape
    overlap, clips = overlaps(device), clip < math.inf
    return PreparedLaunch(
        kernels.rotate_,
        (tokens, 1, 1),
        device,
        Options(num_warps=4, launch_pdl=overlap),
        scale=scale,
        clip=clip if clips else 0.0,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEADS_BLOCK=next_power_of_two((3 if clips else 2) * heads),
        HALF_BLOCK=next_power_of_two(head_dim // 2),
        CLIPS=clips,
        OVERLAP=overlap,
    )


def norm_rotate_(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, scale: float
) -> None:
    """Layer norm of queries and of keys over all heads, without bias, then `rotate_`; in place and in float32.

    One launch.

    Args:
        qkv: [T, 3, heads, head_dim], contiguous.
        query_weight: [heads * head_dim].
        key_weight: likewise.
        eps: added to the variance.
        cos: as in `rotate_`.
        sin: likewise.
        scale: of the queries.
    """
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
    """The gated activation silu(gate) up (Shazeer 2020) of gate and up, [T, 2 * size], as [T, size]. One launch."""
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
    """The activation x / 2 (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel 2016), in place; one launch."""
    _gelu_(x.shape, x.device)(x_ptr=x)


@_by_shape
def _gelu_(shape: torch.Size, device: torch.device) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    grid = (-(-shape.numel() // _BLOCK), 1, 1)
    return PreparedLaunch(kernels.gelu_, grid, device, Options(num_warps=4), count=shape.numel(), BLOCK=_BLOCK)


def quantize(x: Tensor, activation: Literal["gelu", "swiglu"] | None = None) -> Quantized:
    """As `float8.quantize`, of x [T, size] or its activation; one launch.

    Args:
        x: [T, size], contiguous; [T, 2 * size] for `swiglu`.
        activation: that comes before, see `gelu_` and `swiglu`.
    """
    tokens, size = x.shape[0], x.shape[1] // (2 if activation == "swiglu" else 1)
    codes = x.new_empty(tokens, size, dtype=CODES)
    scales = x.new_empty(tokens, 1, dtype=torch.float32)
    _quantize(codes.shape, x.device, activation)(x_ptr=x, codes_ptr=codes, scales_ptr=scales)
    return Quantized(codes, scales)


@_by_shape
def _quantize(shape: torch.Size, device: torch.device, activation: str | None) -> PreparedLaunch:
    from esm_turbo.ops.kernels import encoder as kernels

    tokens, size = shape
    warps = 4 if size <= _LONG_ROW else 16
    # Threads load 16 bytes each.
    block = min(256 * warps, next_power_of_two(size))
    overlap = overlaps(device)
    return PreparedLaunch(
        kernels.quantize,
        (tokens, 1, 1),
        device,
        Options(warps, launch_pdl=overlap),
        SIZE=size,
        BLOCK=block,
        BLOCKS=-(-size // block),
        ACTIVATION=activation or "",
        OVERLAP=overlap,
    )


class SeenKeys(NamedTuple):
    """The keys that each row of packed tokens sees, where these are not its own.

    Attributes:
        firsts: first token that each row sees, and T, int32 [rows + 1].
        counts: number of tokens that it sees, int32 [rows].
        most: the largest of them.
    """

    firsts: Tensor
    counts: Tensor
    most: int

    def on(self, device: torch.device) -> SeenKeys:
        """The same on a device."""
        return SeenKeys(self.firsts.to(device), self.counts.to(device), self.most)


def attend(qkv: Tensor, offsets: Tensor, longest: int, seen: SeenKeys | None = None) -> Tensor:
    """Attention of every row's tokens to each other, or to what the row sees; one launch.

    Flash attention (Dao 2023), as `torch.nn.attention.varlen` calls it, at less cost for the host.

    Args:
        qkv: after scaling and rotation, [T, 3, heads, head_dim].
        offsets: of every row's first token, and T, int32 [rows + 1].
        longest: tokens of the longest row.
        seen: the keys that rows see; None for their own.

    Returns:
        [T, heads, head_dim].
    """
    query, keys, values = qkv.unbind(1)
    firsts, counts, most = seen or (offsets, None, longest)
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, offsets, firsts, longest, most, 0.0, False, False, scale=1.0, seqused_k=counts
    )[0]
    return output
