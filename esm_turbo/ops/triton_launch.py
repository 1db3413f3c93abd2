"""Common parts of the launchers of Triton kernels; `launch` itself.

Triton's own launch prepares its arguments anew each time, which costs the host more than anything else in a layer, and
compiles a variant for every argument that happens to be 1 or a multiple of 16. `launch` compiles few variants, and
launches them directly. triton is imported when a kernel runs.
"""

from __future__ import annotations

import functools
import operator as operators
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
    """Compilation and work distribution of a kernel.

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
    """True if Triton's interpreter runs the kernels, which has no inline assembly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def overlaps(device: torch.device) -> bool:
    """True if a kernel may begin before the kernel it depends on has ended; it then waits for it where it must."""
    return OVERLAP and device.type == "cuda" and capability_of(device) >= _OVERLAP_CAPABILITY


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def fence(device: torch.device) -> None:
    """Completes all writes so far before any later kernel begins: launches one kernel that does not overlap."""
    if overlaps(device):
        torch.zeros(1, device=device)


def operator(
    name: str, fake: Callable[..., _R], mutates_args: Sequence[str] = (), schema: str | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Registers a launcher as the operator `esm_turbo::name`, and lets eager inference call the launcher directly.

    The dispatch of an operator costs the host several times what the launch does, see `is_plain`.

    Args:
        name: of the operator.
        fake: makes empty results, for tracing.
        mutates_args: arguments that are written into.
        schema: of the operator; None takes it from the launcher's annotations.
    """

    def register(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
        registered = torch.library.custom_op(f"esm_turbo::{name}", mutates_args=mutates_args, schema=schema)(launcher)
        registered.register_fake(fake)

        @functools.wraps(launcher)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if is_plain():
                return launcher(*args, **kwargs)
            result: _R = registered(*args, **kwargs)
            return result

        return call

    return register


def is_plain() -> bool:
    """True if nobody but the device looks at operations: tracing, dispatch modes and gradients need operators."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled() or _get_current_dispatch_mode() is not None)


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
    plan = _plan_of(kernel)
    if plan.kernel is None:
        kernel[grid](**arguments, **{name: x for name, x in options._asdict().items() if x is not None})
    elif _recorded.variants is not None:
        _recorded.variants.append(plan.variant(options, arguments, _recorded.capability))
    elif _is_current(device):
        variant, values = _find(plan, device, options, arguments)
        _run(variant, grid, device, values)
    else:
        with torch.cuda.device(device):
            variant, values = _find(plan, device, options, arguments)
            _run(variant, grid, device, values)


class PreparedLaunch:
    """A launch of which all but the tensors is known, for calls that have to look up nothing but their addresses.

    Args:
        kernel: with its tensors first, and its constants last.
        grid: number of programs.
        device: of all tensors.
        options: of the compiler.
        **known: arguments that are no tensors; None for tensors that there are not; and, for tuples of tensors that the
            kernel reads as other dtypes than theirs, these.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], device: torch.device, options: Options, **known: Any
    ) -> None:
        self._kernel, self._grid, self._device, self._options, self._known = kernel, grid, device, options, known
        pointers = [name for name in kernel.arg_names if name.endswith(("_ptr", "_ptrs"))]
        self._absent = [i for i, name in enumerate(pointers) if known.get(name, ...) is None]
        # An absent tensor is an empty tuple.
        self._tuples = sorted([*self._absent, *(i for i, name in enumerate(pointers) if name.endswith("_ptrs"))])
        self._numbers = [known[name] for name in kernel.arg_names[len(pointers) :]]
        # Variants by dtypes, for tensors that all begin at multiples of 16 bytes.
        self._variants: dict[tuple[torch.dtype, ...], _Loaded] = {}

    def __call__(self, **tensors: Any) -> None:
        """Launches the kernel; in the interpreter, runs it.

        Args:
            **tensors: of the kernel, in its order, and tuples of them where it takes tuples.

        Raises:
            KernelError: the kernel does not compile.
            KernelCacheError: the cache of compiled kernels cannot be used.
        """
        given = [*tensors.values()]
        for position in self._absent:
            given[position] = ()
        flat = given.copy()
        for position in reversed(self._tuples):
            flat[position : position + 1] = given[position]
        # Loops over tensors, of which there are up to thirty, run in C.
        values: list[Any] = [*map(_ADDRESS, flat)]
        dtypes = (*map(_DTYPE, flat),)
        variant = self._variants.get(dtypes)
        unaligned = functools.reduce(operators.or_, values) & _UNALIGNED
        if variant is None or unaligned or _recorded.variants is not None or not _is_current(self._device):
            self._launch(tensors, None if unaligned else dtypes)
            return
        for position in self._tuples:
            end = position + len(given[position])
            values[position:end] = [tuple(values[position:end])]
        for position in self._absent:
            values[position] = None
        _run(variant, self._grid, self._device, values + self._numbers)

    def _launch(self, tensors: dict[str, Any], dtypes: tuple[torch.dtype, ...] | None) -> None:
        """Launches as `launch` does, and remembers the variant for tensors of these dtypes."""
        named = self._known | tensors
        for name in self._known.keys() & tensors.keys():
            assert (tensors[name] is None) == (self._known[name] is None), name
            if tensors[name] is not None:
                named[name] = tuple(x.view(dtype) for x, dtype in zip(tensors[name], self._known[name], strict=True))
        arguments = {name: named[name] for name in self._kernel.arg_names}
        launch(self._kernel, self._grid, self._device, self._options, **arguments)
        plan = _plan_of(self._kernel)
        if plan.kernel is not None and _recorded.variants is None and dtypes is not None and _is_current(self._device):
            self._variants[dtypes], _ = _find(plan, self._device, self._options, arguments)


def _is_current(device: torch.device) -> bool:
    # Without the check of `torch.cuda.current_device` that CUDA is initialised, which it is where tensors lie on it.
    return device.index == torch._C._cuda_getDevice()


def _find(plan: _Plan, device: torch.device, options: Options, arguments: dict[str, Any]) -> tuple[_Loaded, list[Any]]:
    """The variant for these arguments, on the current device, and the arguments with addresses in place of tensors."""
    values = list(arguments.values())
    key: list[Any] = [device.index, options, *values[plan.first_constant :]]
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
    found = tuple(key)
    variant = plan.loaded.get(found)
    if variant is None:
        variant = plan.loaded[found] = _load(plan, options, arguments)
    return variant, values


def _run(variant: _Loaded, grid: tuple[int, int, int], device: torch.device, values: list[Any]) -> None:
    """Launches a variant on the current device."""
    # As Triton's own `compiled[grid](...)` does, which takes the host several times as long; None stands for its hooks.
    variant.run(*grid, variant.stream_of(device.index), variant.function, variant.metadata, None, None, None, *values)


class _Loaded(NamedTuple):
    """A variant on a device, as Triton launches it."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    stream_of: Callable[[int], Any]


def _load(plan: _Plan, options: Options, arguments: dict[str, Any]) -> _Loaded:
    """Compiles a variant and loads it on the current device."""
    from triton.runtime import driver

    major, minor = capability_of(torch.device("cuda", torch.cuda.current_device()))
    compiled = plan.variant(options, arguments, 10 * major + minor).compile()
    try:
        return _Loaded(compiled.run, compiled.function, compiled.packed_metadata, driver.active.get_current_stream)
    except Exception as error:
        raise failure(plan.name, error) from error


class _Plan:
    """Rules by which the arguments of a kernel select its variant.

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
        self.loaded: dict[Any, _Loaded] = {}

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
_ADDRESS, _DTYPE = Tensor.data_ptr, operators.attrgetter("dtype")
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
_plans: dict[int, _Plan] = {}


def _plan_of(kernel: Any) -> _Plan:
    plan = _plans.get(id(kernel))
    return _plans.setdefault(id(kernel), _Plan(kernel)) if plan is None else plan


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
    """Arguments of a kernel for the strides of tensors [B, H, n, D], see `strides_of`."""
    named: dict[str, int] = {}
    for name, x in tensors.items():
        named |= strides_of(name, x.shape, x.stride())
    return named


def strides_of(name: str, sizes: Sequence[int], steps: Sequence[int]) -> dict[str, int]:
    """Arguments of a kernel for a tensor x [B, H, n, D]: `stride_xb`, `stride_xh` and `stride_xn`, in elements.

    0 for a dimension of size 1, whose stride may be anything.
    """
    return {key: 0 if size == 1 else step for key, size, step in zip(_stride_names(name), sizes, steps, strict=False)}


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
