"""Fused query, key and value projections: one matrix multiplication in place of three."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Not in the modules, whose copies would each copy the weight.
_STACKED: WeakKeyDictionary[nn.Module, tuple[list[int], Tensor]] = WeakKeyDictionary()


def fuse_linears(linears: Sequence[nn.Module]) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of linear layers, stacked along the outputs; None if one of them is not plain.

    The layers' own parameters become views of the result.
    """
    if not all(_is_plain(linear) and linear.bias is not None for linear in linears):
        return None
    weight, bias = (_stack_in_place([getattr(linear, name) for linear in linears]) for name in ("weight", "bias"))
    return weight, bias


def stacked_weight(owner: nn.Module, linears: Sequence[nn.Linear]) -> Tensor:
    """Weights of linear layers of one module, stacked along the outputs, remembered while their addresses stay.

    The layers' own weights become views of the result.
    """
    addresses = [linear.weight.data_ptr() for linear in linears]
    remembered = _STACKED.get(owner)
    if remembered is None or remembered[0] != addresses:
        weight = _stack_in_place([linear.get_parameter("weight") for linear in linears])
        addresses = [linear.weight.data_ptr() for linear in linears]
        # Held here, the storage stays alive, so that equal addresses mean the same weights.
        remembered = _STACKED[owner] = (addresses, weight)
    return remembered[1]


def _is_plain(module: nn.Module) -> bool:
    """Tell whether a module only multiplies: adapters replace it or its forward, or register hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is nn.Linear and not hooked


def _stack_in_place(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Parameters stacked along the first dimension, sharing storage with the result; moved only if they do not yet."""
    first, sizes = parameters[0], [parameter.shape[0] for parameter in parameters]
    starts = [first.data_ptr() + first[0].nbytes * sum(sizes[:i]) for i in range(len(parameters))]
    shared = all(p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for p in parameters)
    if shared and all(p.is_contiguous() for p in parameters) and [p.data_ptr() for p in parameters] == starts:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    stacked = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, view in zip(parameters, stacked.split(sizes), strict=True):
        parameter.data = view
    return stacked
