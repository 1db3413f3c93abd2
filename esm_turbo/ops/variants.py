"""Variants of a Triton kernel: what it is compiled for. Needs no GPU and no torch, which worker processes do not load.

triton is imported when a kernel is compiled.
"""

from __future__ import annotations

import errno
import hashlib
from importlib import import_module
from typing import Any, NamedTuple

_ALIGNMENT = 16
# A cache that cannot be written, or read.
_CACHE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class KernelError(RuntimeError):
    """A GPU kernel could not be compiled."""


class KernelCacheError(OSError):
    """The folder in which Triton keeps compiled kernels cannot be used."""


class Variant(NamedTuple):
    """A kernel and what it is compiled for.

    Attributes:
        module: that defines the kernel.
        name: of the kernel.
        signature: type of every parameter in Triton's notation, `constexpr` for constants; tuples for tuples.
        constants: values of the constants, in order.
        aligned: positions of the parameters that are multiples of 16; of entries of tuples, position and index.
        options: of the compiler, by name.
        capability: of the device, such as 90.
    """

    module: str
    name: str
    signature: tuple[Any, ...]
    constants: tuple[Any, ...]
    aligned: tuple[tuple[int, ...], ...]
    options: tuple[tuple[str, Any], ...]
    capability: int

    def compile(self) -> Any:
        """The kernel as Triton compiles it, or finds it in its cache.

        Raises:
            KernelError: it does not compile.
            KernelCacheError: the cache cannot be read or written.
        """
        import triton

        try:
            return triton.compile(self.source(), target=self.target(), options=dict(self.options))
        except Exception as error:
            raise failure(self.name, error) from error

    def is_cached(self) -> bool:
        """True if Triton has compiled the variant before, on this machine.

        Raises:
            KernelCacheError: the cache cannot be read or written.
        """
        from triton.compiler import make_backend
        from triton.compiler.compiler import get_cache_invalidating_env_vars
        from triton.runtime.cache import get_cache_key, get_cache_manager

        source, backend = self.source(), make_backend(self.target())
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        try:
            manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
            return bool(manager.get_group(f"{self.name}.json"))
        except OSError as error:
            raise failure(self.name, error) from error

    def source(self) -> Any:
        """The source that Triton compiles."""
        from triton.compiler import ASTSource

        kernel = getattr(import_module(self.module), self.name)
        positions = [position for position, kind in enumerate(self.signature) if kind == "constexpr"]
        return ASTSource(
            kernel,
            signature=dict(zip(kernel.arg_names, self.signature, strict=True)),
            constexprs={(p,): value for p, value in zip(positions, self.constants, strict=True)},
            attrs={position: [["tt.divisibility", _ALIGNMENT]] for position in self.aligned},
        )

    def target(self) -> Any:
        """The target of the compilation."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def failure(name: str, error: Exception) -> KernelError | KernelCacheError:
    """The error to raise for a kernel that could not be compiled: one line that names what is wrong."""
    import triton

    if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
        return KernelCacheError(
            f"the cache of compiled kernels, {triton.knobs.cache.dir}, cannot be used ({error.strerror}): mend it, or"
            " set TRITON_CACHE_DIR to another folder"
        )
    # Triton's messages show the source, and end with the reason.
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    reason = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return KernelError(f"triton {triton.__version__} cannot compile the GPU kernel {name!r}: {reason}")
