"""Eight-bit products: linear layers of e4m3 numbers, with a scale for each output of a weight and for each token.

A row x is stored as codes x / s, rounded to e4m3, and its scale s = max |x| / 448, so that the largest magnitude
becomes the largest code (Micikevicius et al. 2022). Tensor cores multiply codes twice as fast as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from esm_turbo.ops import reference

__all__ = ["DTYPE", "Float8Linear", "Quantized", "float8_linear", "quantize"]

DTYPE = torch.float8_e4m3fn
"""Of codes."""
LARGEST_CODE = 448.0
# cuBLAS finds no algorithm for fewer tokens of more inputs with a bias.
_FEWEST_TOKENS, _MANY_INPUTS = 64, 5120
# Rows of zeros have a scale, too.
_SMALLEST_MAXIMUM = 2.0**-60


class Quantized(NamedTuple):
    """Rows in e4m3.

    Attributes:
        codes: float8_e4m3fn [T, size].
        scales: what codes are multiplied by, float32 [T, 1].
    """

    codes: Tensor
    scales: Tensor


def quantize(x: Tensor) -> Quantized:
    """Round rows [..., size] to e4m3; NaN and infinity become NaN.

    The same on every device, to the bit.
    """
    x = x.float().reshape(-1, x.shape[-1])
    largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST_MAXIMUM)
    # As numbers of one device: those of a CPU and of Triton would be rounded twice.
    limit = largest.new_tensor(LARGEST_CODE)
    return Quantized((x * (limit / largest)).to(DTYPE), largest / limit)


def float8_linear(x: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer x W^T + b of codes, summed in float32 and rounded once; see `reference.float8_linear`.

    Args:
        x: [T, inputs].
        weight: float8_e4m3fn [outputs, inputs].
        scales: of its rows, float32 [outputs, 1].
        bias: bfloat16 [outputs], or None.

    Returns:
        bfloat16 [T, outputs].
    """
    if x.codes.device.type != "cuda":
        return reference.float8_linear(x, weight, scales, bias)
    tokens = len(x.codes)
    if bias is not None and tokens < _FEWEST_TOKENS and x.codes.shape[1] > _MANY_INPUTS:
        added = 0, 0, 0, _FEWEST_TOKENS - tokens
        x = Quantized(functional.pad(x.codes.view(torch.uint8), added).view(DTYPE), functional.pad(x.scales, added))
    output: Tensor = torch._scaled_mm(
        x.codes, weight.t(), x.scales, scales.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return output[:tokens]


class Float8Linear(nn.Module):
    """A linear layer of bfloat16 as an eight-bit product.

    Attributes:
        weight: codes, float8_e4m3fn [outputs, inputs].
        scales: float32 [outputs, 1].
        bias: bfloat16 [outputs], or None.
        described: the weight before it was rounded, for `files.fingerprint`.
    """

    scales: Tensor

    def __init__(self, linear: nn.Linear, described: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = quantize(linear.weight.detach())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales)
        self.bias = linear.bias
        self.described = described

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to bfloat16 [..., outputs].

        Raises:
            ValueError: a gradient is asked for, which rounding does not have.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                "eight-bit products have no gradients: load the model without precision='fp8' to train it, or run it"
                " under torch.no_grad()"
            )
        return float8_linear(quantize(x), self.weight, self.scales, self.bias).view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, *_: Any) -> None:
        raise ValueError("a model with eight-bit products is not saved: save the one that it was made of")

    def _load_from_state_dict(self, *_: Any) -> None:
        raise ValueError("weights of a model with eight-bit products are not replaced: load one of these weights anew")

    # Modules are cast, and tensors pickled, as bytes: to cast codes would lose their scales, and PyTorch pickles none.
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if fn(self.scales.new_empty(0, dtype=torch.bfloat16)).dtype != torch.bfloat16:
            raise ValueError("a model with eight-bit products stays in bfloat16: load it again for another dtype")

        def move(x: Tensor) -> Tensor:
            return fn(x) if x.dtype == torch.bfloat16 else fn(x.view(torch.uint8)).view(x.dtype)

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        codes = nn.Parameter(self.weight.view(torch.uint8), requires_grad=False)
        return {**self.__dict__, "_parameters": {**self._parameters, "weight": codes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = nn.Parameter(self.weight.view(DTYPE), requires_grad=False)
