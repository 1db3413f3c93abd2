"""Several devices on a machine that has none: the CPU under several numbers, which must not be mixed.

PyTorch has one CPU. While `NumberedCpus` is active, every tensor is on one of several, `cpu:0`, `cpu:1` and so on, by
`x.device`; `x.to("cpu:1")` copies it to another, results are where their arguments are, and an operation on tensors of
several raises, as it would on GPUs. As there, tensors without dimensions may be combined with all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
# What asks, and computes nothing.
_QUESTIONS = (torch.device, torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type)
# What copies between devices.
_COPIES = {Tensor.copy_, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type_as}


def number_of(x: Tensor) -> int:
    """The number of the CPU on which a tensor is."""
    return getattr(x, "_cpu", 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for x in tree_iter(value) if isinstance(x, Tensor))


class NumberedCpus(TorchFunctionMode):
    """See the module."""

    def __enter__(self) -> Any:
        # The only one of PyTorch's functions here that no mode sees.
        self._new = nn.Parameter.__new__

        def new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
            made = self._new(cls, data, requires_grad)
            made._cpu = 0 if data is None else number_of(data)  # type: ignore[attr-defined]
            return made

        nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        nn.Parameter.__new__ = self._new  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        if func == _DEVICE:
            device = func(*args)
            return torch.device("cpu", number_of(args[0])) if device.type == "cpu" else device
        if func == _DATA[1]:
            args[0]._cpu = number_of(args[1])
            return func(*args)
        asked, args, kwargs = _without_device(args, kwargs)
        given = list(_tensors((args, kwargs)))
        numbers = {number_of(x) for x in given if x.dim()}
        if func is Tensor.copy_ or getattr(func, "__name__", "") == "__deepcopy__":
            number = number_of(args[0])
        elif func in _COPIES:
            number = 0 if func is Tensor.cpu else number_of(given[-1]) if asked is None else asked
        elif asked is not None:
            number = asked
        elif len(numbers) > 1:
            raise RuntimeError(f"{getattr(func, '__name__', func)}: tensors on CPUs {sorted(numbers)}")
        else:
            number = next(iter(numbers), next((number_of(x) for x in given), 0))
        result = func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cpu) and result is args[0] and number != number_of(result):
            result = result.clone()
        for x in _tensors(result):
            if not any(x is one for one in given):
                x._cpu = number
        return result


def _without_device(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | None, tuple[Any, ...], dict[str, Any]]:
    """The number of the CPU that a call names, and its arguments with the only CPU that PyTorch has."""
    found: list[int] = []

    def plain(value: Any) -> Any:
        named = isinstance(value, str) and (value == "cpu" or value.startswith("cpu:"))
        if named or (isinstance(value, torch.device) and value.type == "cpu"):
            found.append(torch.device(value).index or 0)
            return torch.device("cpu")
        return value

    args, kwargs = tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}
    return (found[-1] if found else None), args, kwargs
