"""What the launchers of the Triton kernels share. Triton is not needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from esm_turbo.codecs import KVCodec
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK

# Programmatic dependent launch: whether it may be used, and the first compute capability that has it.
OVERLAP = True
_OVERLAP_CAPABILITY = (9, 0)

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Tuning:
    """How a kernel is compiled, and how its work is distributed.

    Attributes:
        tile: tokens per tile: a block of 64 columns, or a fraction of it.
        warps: per program; None for a number that suits the size of a head.
        stages: of the software pipeline over tiles; 1 for none.
        registers: upper bound per thread; None leaves it to the compiler.
        programs: number over which the work is distributed; 0 leaves the tiles of a row together, None takes as many
            as run at the same time.
    """

    tile: int = KEY_BLOCK
    warps: int | None = None
    stages: int = 1
    registers: int | None = None
    programs: int | None = None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, which has no inline assembly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin before the kernel it depends on has ended; it then waits for it where it must."""
    return OVERLAP and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OVERLAP_CAPABILITY


def fence(device: torch.device) -> None:
    """Completes all writes so far before any later kernel begins: launches one kernel that does not overlap."""
    if overlaps(device):
        torch.zeros(1, device=device)


def operator(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Registers a launcher as the operator `esm_turbo::name`, and lets eager inference call the launcher directly.

    The dispatch of an operator costs the host several times what the launch does. Tracing, dispatch modes and recorded
    gradients need the operator itself.
    """

    def register(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
        registered = torch.library.custom_op(f"esm_turbo::{name}", mutates_args=mutates_args)(launcher)

        @functools.wraps(launcher)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_compiling() or torch.is_grad_enabled() or _get_current_dispatch_mode() is not None:
                result: _R = registered(*args, **kwargs)
                return result
            return launcher(*args, **kwargs)

        return call

    return register


def empty_by_token(x: Tensor) -> Tensor:
    """An empty tensor like x [B, H, n, D], contiguous as [B, n, H, D], which linear layers read and write."""
    batch_size, heads, n, head_dim = x.shape
    return torch.empty(batch_size, n, heads, head_dim, dtype=x.dtype, device=x.device).transpose(1, 2)


def strides(**tensors: Tensor) -> dict[str, int]:
    """Arguments of a kernel for tensors x [B, H, n, D]: `stride_xb`, `stride_xh` and `stride_xn`, in elements."""
    return {f"stride_{name}{axis}": x.stride(dim) for name, x in tensors.items() for dim, axis in enumerate("bhn")}


def per_codec(function: Callable[Concatenate[KVCodec, _P], _R]) -> Callable[Concatenate[KVCodec, _P], _R]:
    """Caches a function of a codec and other, hashable arguments for as long as the codec lives."""
    cached: WeakKeyDictionary[KVCodec, dict[Any, _R]] = WeakKeyDictionary()

    @functools.wraps(function)
    def lookup(codec: KVCodec, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        results = cached.setdefault(codec, {})
        key = (args, *kwargs.items())
        if key not in results:
            results[key] = function(codec, *args, **kwargs)
        return results[key]

    return lookup
