"""Fused query, key and value projections: one matrix multiplication in place of three."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esm_turbo.ops.float8 import Float8Linear

MOVING = threading.RLock()
"""Held while weights move to other addresses, and while a graph, which knows only addresses, is captured."""
# Not in the modules, whose copies would each copy the weight.
_STACKED: WeakKeyDictionary[nn.Module, dict[str, tuple[list[int], Tensor]]] = WeakKeyDictionary()


class LinearParameters(NamedTuple):
    """Parameters of a linear layer, as `triton_encoder.linear` takes them.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs], or None.
        scales: of an eight-bit product, float32 [outputs, 1]; None for any other.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None

    @classmethod
    def of(cls, linear: nn.Module) -> LinearParameters:
        """The parameters of a `Linear` or `Float8Linear`."""
        return cls(linear.weight, linear.bias, getattr(linear, "scales", None))  # type: ignore[arg-type]

    @property
    def quantizes(self) -> bool:
        """True if the product takes eight-bit numbers."""
        return self.scales is not None


def fuse_linears(linears: Sequence[nn.Module]) -> LinearParameters | None:
    """Parameters of linear layers, stacked along the outputs; None if one of them is not plain.

    The layers' own parameters become views of the result.
    """
    if not all(is_plain_linear(linear) and linear.bias is not None for linear in linears):
        return None
    names = ("weight", "bias", "scales") if isinstance(linears[0], Float8Linear) else ("weight", "bias")
    return LinearParameters(*(_stack_in_place([getattr(linear, name) for linear in linears]) for name in names))


def stacked_weight(
    owner: nn.Module, linears: Sequence[nn.Module], name: Literal["weight", "scales"] = "weight"
) -> Tensor:
    """Weights of linear layers of one module, stacked along the outputs, remembered while their addresses stay.

    The layers' own weights become views of the result. Those of eight-bit products have scales, too.
    """

    def remembered() -> Tensor | None:
        addresses, weight = stacked.get(name, ([], None))
        return weight if addresses == [getattr(linear, name).data_ptr() for linear in linears] else None

    stacked = _STACKED.setdefault(owner, {})
    if (weight := remembered()) is not None:
        return weight
    with MOVING:
        if (weight := remembered()) is None:
            weight = _stack_in_place([getattr(linear, name) for linear in linears])
            # Held here, the storage stays alive, so that equal addresses mean the same weights.
            stacked[name] = [getattr(linear, name).data_ptr() for linear in linears], weight
    return weight


def is_plain_linear(module: nn.Module) -> bool:
    """Tell whether a module only multiplies: adapters replace it or its forward, or register hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) in (nn.Linear, Float8Linear) and not hooked


def _stack_in_place(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters stacked along the first dimension, sharing storage with the result; moved only if they do not yet.

    To be called with `MOVING` held.

    Raises:
        RuntimeError: they have to be moved while a graph is captured, which would not write them.
    """
    first, sizes = parameters[0], [parameter.shape[0] for parameter in parameters]
    starts = [first.data_ptr() + first[0].nbytes * sum(sizes[:i]) for i in range(len(parameters))]
    shared = all(p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for p in parameters)
    if shared and all(p.is_contiguous() for p in parameters) and [p.data_ptr() for p in parameters] == starts:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    on_cuda = first.device.type == "cuda"
    if on_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("weights moved while a graph was captured")
    # Within the caller's `torch.inference_mode` they would become tensors that count no writes and need no gradients.
    with torch.inference_mode(first.is_inference()):
        stacked = torch.cat([parameter.detach() for parameter in parameters])
        if on_cuda:
            # Other streams may read them from now on.
            torch.cuda.synchronize(first.device)
        for parameter, view in zip(parameters, stacked.split(sizes), strict=True):
            parameter.data = view
    return stacked
