"""Models whose layers run eight-bit products, see `ops.float8`.

The four products of a layer take nearly all of its time: queries, keys and values; the attention's output; and the
two of the feed-forward network. Each that is chosen becomes a `Float8Linear`; everything else stays in bfloat16.
Weights are rounded once, so that they take half the memory, and tokens in the kernels of the norms and activations
before products.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
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


def quantize_products(model: Any, keep: Collection[Product] | None = None) -> None:
    """Make the products of a model's layers eight-bit products, in place.

    Args:
        model: in bfloat16, with a head or without.
        keep: products that stay as they are; None keeps those that the model's calibration found sensitive, if any.
            Those that are eight-bit products already remain so.

    Raises:
        ValueError: the model is of a family without such products, in another dtype, or adapted; or a name is wrong.
    """
    known = all_products(model)
    if keep is None:
        calibration = model.base_model.calibration
        quality = None if calibration is None else calibration.quality
        keep = () if quality is None or quality.eight_bits is None else quality.eight_bits.keep
    if unknown := set(keep) - set(known):
        raise ValueError(f"{min(unknown)} is none of {PRODUCTS} in {len(known) // len(PRODUCTS)} layers")
    for parent, name, linear in _linears(model, set(known) - set(keep)):
        setattr(parent, name, Float8Linear(linear, describe_weight(linear.weight).cpu()).train(linear.training))


@contextmanager
def in_eight_bits(model: Any, products: Collection[Product]) -> Iterator[None]:
    """Run these products of a model in eight bits, and afterwards as before; see `quantize_products`."""
    linears = _linears(model, products)
    try:
        for parent, name, linear in linears:
            setattr(parent, name, Float8Linear(linear).train(linear.training))
        yield
    finally:
        for parent, name, linear in linears:
            setattr(parent, name, linear)


def all_products(model: Any) -> list[Product]:
    """The products of a model, layer by layer.

    Raises:
        ValueError: it is of a family without products that can be eight-bit products.
    """
    encoder = model.base_model
    if not encoder.products:
        raise ValueError(f"precision 'fp8' is for ESM-2 and ESM-C, not for {encoder.family.name}")
    return [(index, name) for index, products in enumerate(encoder.products) for name in products]


def _linears(model: Any, products: Collection[Product]) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of products that are not eight-bit products yet, each as an attribute of a module.

    Raises:
        ValueError: one of them cannot become an eight-bit product.
    """
    encoder = model.base_model
    chosen = {id(linear) for index, name in products for linear in encoder.products[index][name]}
    found = []
    for parent in encoder.modules():
        for name, linear in parent.named_children():
            if id(linear) in chosen and not isinstance(linear, Float8Linear):
                _check_linear(linear)
                found.append((parent, name, linear))
    return found


def _check_linear(linear: nn.Module) -> None:
    if not is_plain_linear(linear):
        raise ValueError(
            f"precision 'fp8' needs plain linear layers, and a {type(linear).__qualname__} has hooks or adapters:"
            " merge them first"
        )
    assert isinstance(linear, nn.Linear)
    sizes = list(linear.weight.shape)
    if linear.weight.dtype != torch.bfloat16:
        raise ValueError(f"precision 'fp8' needs a model in bfloat16, got {linear.weight.dtype}")
    if any(size % _MULTIPLE for size in sizes):
        raise ValueError(f"precision 'fp8' needs layers of multiples of {_MULTIPLE} numbers, got {sizes}")
