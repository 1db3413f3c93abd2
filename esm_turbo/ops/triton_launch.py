"""What the launchers of the Triton kernels share; `launch` itself.

Triton's own launch prepares its arguments anew each time, which costs the host more than anything else in a layer, and
compiles a variant for every argument that happens to be 1 or a multiple of 16. `launch` compiles few variants, and
launches them directly. triton is imported when a kernel runs.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from esm_turbo.codecs import KVCodec
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK
from esm_turbo.ops.variants import Variant, failure

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
    return OVERLAP and device.type == "cuda" and capability_of(device) >= _OVERLAP_CAPABILITY


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


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


class Options(NamedTuple):
    """Options of Triton's compiler; `maxnreg` and `launch_pdl` are CUDA's."""

    num_warps: int
    num_stages: int = 3
    maxnreg: int | None = None
    launch_pdl: bool = False


def launch(kernel: Any, grid: tuple[int, int, int], device: torch.device, options: Options, **arguments: Any) -> None:
    """Launches a kernel on the device's current stream; in the interpreter, runs it.

    A variant is compiled for each combination of constants, dtypes, and of tensors and strides that are multiples of 16
    or not. Other integers are never looked at: they are 32 bits wide unless the kernel says otherwise.

    Args:
        kernel: with its constants last.
        grid: number of programs.
        device: of all tensors.
        options: of the compiler.
        arguments: of the kernel, in its order.

    Raises:
        KernelError: the kernel does not compile.
        KernelCacheError: the cache of compiled kernels cannot be used.
    """
    plan = _plans.get(id(kernel))
    if plan is None:
        plan = _plan_of(kernel)
    if plan.kernel is None:
        kernel[grid](**arguments, **{name: x for name, x in options._asdict().items() if x is not None})
        return
    values = list(arguments.values())
    key: list[Any] = [device.index, options, *values[plan.first_constant :]]
    # This loop is most of what a launch costs the host.
    for position, aligned in plan.specialised:
        value = values[position]
        kind = value.__class__
        if kind is Tensor or kind is Parameter:
            values[position] = address = value.data_ptr()
            key.append(value.dtype)
            if address & _UNALIGNED and aligned:
                key.append(position)
        elif kind is int:
            if value & _UNALIGNED:
                key.append(position)
        elif kind is tuple:
            values[position] = addresses = tuple([x.data_ptr() for x in value])
            key += [x.dtype for x in value]
            key += [(position, i) for i, address in enumerate(addresses) if address & _UNALIGNED]
        else:
            assert value is None
            key.append(None)
    if _recorded.variants is not None:
        _recorded.variants.append(plan.variant(options, arguments, _recorded.capability))
        return
    current = torch.cuda.current_device()
    if device.index != current:
        with torch.cuda.device(device):
            _run(plan, tuple(key), grid, options, arguments, values)
    else:
        _run(plan, tuple(key), grid, options, arguments, values)


def _run(
    plan: _Plan, key: Any, grid: tuple[int, int, int], options: Options, arguments: dict[str, Any], values: list[Any]
) -> None:
    """Launches the variant of a key on the current device."""
    loaded = plan.loaded.get(key)
    if loaded is None:
        loaded = plan.loaded[key] = _load(plan, options, arguments)
    run, function, metadata, stream_of = loaded
    # As Triton's own launch does; None stands for its hooks.
    run(*grid, stream_of(key[0]), function, metadata, None, None, None, *values)


def _load(plan: _Plan, options: Options, arguments: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Compiles a variant and loads it on the current device."""
    from triton.runtime import driver

    major, minor = capability_of(torch.device("cuda", torch.cuda.current_device()))
    compiled = plan.variant(options, arguments, 10 * major + minor).compile()
    try:
        return compiled.run, compiled.function, compiled.packed_metadata, driver.active.get_current_stream
    except Exception as error:
        raise failure(plan.name, error) from error


class _Plan:
    """How the arguments of a kernel decide its variant.

    Attributes:
        kernel: None in the interpreter.
        name: of the kernel.
        first_constant: its position.
        specialised: positions of tensors and strides, and whether they are looked at for being multiples of 16.
        loaded: kernels as they are launched, by the arguments that decide.
    """

    def __init__(self, kernel: Any) -> None:
        from triton.runtime import JITFunction

        # Held, so that its id stays its own.
        self.given = kernel
        self.kernel = kernel if isinstance(kernel, JITFunction) else None
        if self.kernel is None:
            return
        params = kernel.params
        self.name: str = kernel.__name__
        self.first_constant = next(p.num for p in params if p.is_constexpr)
        assert all(p.is_constexpr for p in params[self.first_constant :])
        self.specialised = [
            (p.num, not p.do_not_specialize_on_alignment)
            for p in params[: self.first_constant]
            if p.name.endswith(("_ptr", "_ptrs")) or p.name.startswith(_ALIGNED_NUMBERS)
        ]
        self.loaded: dict[Any, tuple[Any, Any, Any, Any]] = {}

    def variant(self, options: Options, arguments: dict[str, Any], capability: int) -> Variant:
        """The variant for these arguments."""
        assert self.kernel is not None
        assert list(arguments) == self.kernel.arg_names, f"{self.name}: {list(arguments)}"
        values = list(arguments.values())
        looked_at = dict(self.specialised)
        signature: list[Any] = []
        constants, aligned = [], []
        for parameter, value in zip(self.kernel.params, values, strict=True):
            if parameter.is_constexpr or value is None:
                signature.append("constexpr")
                constants.append(value)
                continue
            signature.append(_type_of(value, parameter))
            for path, part in _parts(parameter.num, value):
                number = part.data_ptr() if isinstance(part, Tensor) else part
                if looked_at.get(parameter.num) and number & _UNALIGNED == 0:
                    aligned.append(path)
        return Variant(
            self.kernel.module,
            self.name,
            tuple(signature),
            tuple(constants),
            tuple(aligned),
            tuple((name, x) for name, x in options._asdict().items() if x is not None),
            capability,
        )


# Integers that are known to be multiples of 16 where they are: strides, and numbers of elements that bound a mask.
_ALIGNED_NUMBERS = ("stride_", "count", "numel")
_UNALIGNED = 15
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
_plans: dict[int, _Plan] = {}


def _plan_of(kernel: Any) -> _Plan:
    return _plans.setdefault(id(kernel), _Plan(kernel))


def _type_of(value: Any, parameter: Any) -> Any:
    """The type of an argument in Triton's notation."""
    if isinstance(value, tuple):
        return tuple(_type_of(x, parameter) for x in value)
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    return parameter.annotation_type or "i32"


def _parts(position: int, value: Any) -> list[tuple[tuple[int, ...], Any]]:
    """An argument, or the entries of a tuple, with their positions."""
    if isinstance(value, tuple):
        return [((position, index), part) for index, part in enumerate(value)]
    return [((position,), value)]


class _Recorded(threading.local):
    variants: list[Variant] | None = None
    capability = 0


_recorded = _Recorded()


@contextmanager
def recorded(capability: int) -> Iterator[list[Variant]]:
    """Launches in this thread are listed, as they would be compiled for a device of this capability, and not run."""
    before = _recorded.variants, _recorded.capability
    variants: list[Variant] = []
    _recorded.variants, _recorded.capability = variants, capability
    try:
        yield variants
    finally:
        _recorded.variants, _recorded.capability = before


@functools.cache
def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for a tensor that a kernel does not read; a kernel without it would be another variant."""
    with torch.inference_mode(False):
        return torch.zeros(_UNALIGNED + 1, dtype=dtype, device=device)


def empty_by_token(x: Tensor) -> Tensor:
    """An empty tensor like x [B, H, n, D], contiguous as [B, n, H, D], which linear layers read and write."""
    batch_size, heads, n, head_dim = x.shape
    return torch.empty(batch_size, n, heads, head_dim, dtype=x.dtype, device=x.device).transpose(1, 2)


def strides(**tensors: Tensor) -> dict[str, int]:
    """Arguments of a kernel for tensors x [B, H, n, D]: `stride_xb`, `stride_xh` and `stride_xn`, in elements.

    0 for a dimension of size 1, whose stride may be anything.
    """
    named = {}
    for name, x in tensors.items():
        sizes, steps = x.shape, x.stride()
        for dim, key in enumerate(_stride_names(name)):
            named[key] = 0 if sizes[dim] == 1 else steps[dim]
    return named


@functools.cache
def _stride_names(name: str) -> tuple[str, ...]:
    return tuple(f"stride_{name}{axis}" for axis in "bhn")


class _Results(dict[Any, Any]):
    """Results that copies of their owner do not inherit."""

    def __deepcopy__(self, memo: object) -> _Results:
        return _Results()

    def __reduce__(self) -> tuple[type[_Results], tuple[()]]:
        return _Results, ()


def per_codec(function: Callable[Concatenate[KVCodec, _P], _R]) -> Callable[Concatenate[KVCodec, _P], _R]:
    """Caches a function of a codec and other, hashable arguments for as long as the codec lives."""
    name = function.__qualname__

    @functools.wraps(function)
    def lookup(codec: KVCodec, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Kept by the codec itself: a dictionary with weak keys takes several times as long to look up.
        kept = codec.__dict__.get("_results")
        if kept is None:
            kept = codec.__dict__.setdefault("_results", _Results())
        key = (name, args, *kwargs.items())
        if key not in kept:
            kept[key] = function(codec, *args, **kwargs)
        result: _R = kept[key]
        return result

    return lookup
