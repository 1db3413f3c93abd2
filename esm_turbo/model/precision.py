"""Models whose layers run eight-bit products, see `ops.float8`.

The four products of a layer take nearly all of its time: queries, keys and values; the attention's output; and the
two of the feed-forward network. Each that is chosen becomes a `Float8Linear`; everything else stays in bfloat16.
Weights are rounded once, so that they take half the memory, and tokens in the kernels of the norms and activations
before products.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
from torch import nn

from esm_turbo.files.fingerprint import describe_weight
from esm_turbo.model.projections import is_plain_linear
from esm_turbo.ops.float8 import Float8Linear

Precision = Literal["fp8"]
"""Of products: `fp8` is row-wise e4m3."""
PRODUCTS = ("qkv", "attention_out", "mlp_in", "mlp_out")
"""Names of a layer's products."""
Product = tuple[int, str]
"""A layer and one of `PRODUCTS`."""

_CAPABILITY = (9, 0)
# Of the operands of tensor cores.
_MULTIPLE = 16


def check_precision(
    precision: str | None, device: torch.device, dtype: torch.dtype | str | None = None, spread: bool = False
) -> None:
    """Check that a precision can be had.

    Args:
        precision: of the products; None for the model's dtype.
        device: of the model.
        dtype: of everything else; None for the default.
        spread: whether layers lie on several devices.

    Raises:
        ValueError: it cannot.
    """
    if precision is None:
        return
    if precision not in get_args(Precision):
        raise ValueError(
            f"`precision` must be None or {' or '.join(map(repr, get_args(Precision)))}, got {precision!r}"
        )
    found = "an Apple GPU" if device.type == "mps" else "a CPU" if device.type == "cpu" else f"a {device.type} device"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY:
            found = ""
        else:
            major, minor = capability
            found = f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"
    if found:
        raise ValueError(
            f"precision 'fp8' needs an NVIDIA GPU of compute capability 9.0 or newer, such as an H100 or H200, and this"
            f" is {found}; leave out the precision"
        )
    if dtype not in (None, torch.bfloat16, "bfloat16"):
        raise ValueError(f"precision 'fp8' needs dtype bfloat16 beside eight-bit products, got {dtype}")
    if spread:
        raise ValueError("precision 'fp8' needs a model on one device: leave out `device_map`")


def quantize_products(model: Any, keep: Collection[Product] = ()) -> None:
    """Make the products of a model's layers eight-bit products, in place.

    Args:
        model: in bfloat16, with a head or without.
        keep: products that stay as they are. Those that are eight-bit products already remain so.

    Raises:
        ValueError: the model is of a family without such products, in another dtype, or adapted; or a name is wrong.
    """
    encoder = model.base_model
    layers = encoder.products
    if not layers:
        raise ValueError(f"precision 'fp8' is for ESM-2 and ESM-C, not for {encoder.family.name}")
    unknown = set(keep) - {(index, name) for index in range(len(layers)) for name in PRODUCTS}
    if unknown:
        raise ValueError(f"{min(unknown)} is none of {PRODUCTS} in {len(layers)} layers")
    chosen = [
        linear
        for index, products in enumerate(layers)
        for name, linears in products.items()
        if (index, name) not in keep
        for linear in linears
        if not isinstance(linear, Float8Linear)
    ]
    for linear in chosen:
        if not is_plain_linear(linear):
            raise ValueError(
                f"precision 'fp8' needs plain linear layers, and a {type(linear).__qualname__} has hooks or adapters:"
                " merge them first"
            )
        sizes = list(linear.weight.shape)
        if linear.weight.dtype != torch.bfloat16:
            raise ValueError(f"precision 'fp8' needs a model in bfloat16, got {linear.weight.dtype}")
        if any(size % _MULTIPLE for size in sizes):
            raise ValueError(f"precision 'fp8' needs layers of multiples of {_MULTIPLE} numbers, got {sizes}")
    wanted = {id(linear) for linear in chosen}
    for parent in list(encoder.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wanted:
                setattr(parent, name, _quantized(child))


def _quantized(linear: nn.Module) -> Float8Linear:
    assert isinstance(linear, nn.Linear)
    made = Float8Linear(linear, describe_weight(linear.weight).cpu())
    made.train(linear.training)
    return made


def quantized_products(model: Any) -> list[Product]:
    """The eight-bit products of a model, by layer."""
    return [
        (index, name)
        for index, products in enumerate(model.base_model.products)
        for name, linears in products.items()
        if isinstance(linears[0], Float8Linear)
    ]
