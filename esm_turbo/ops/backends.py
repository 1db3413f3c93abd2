"""The backends: implementations of encoding, attention to packed contexts, RoPE and activation."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from esm_turbo.codecs import KVCodec, Packed
from esm_turbo.config import Backend
from esm_turbo.files.extras import install_hint
from esm_turbo.ops import reference, torch_ops, triton_attention, triton_encode, triton_layer, warmup

# Not imported: triton is loaded only when a kernel runs.
_TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None
# The first NVIDIA generation that Triton compiles for, and that multiplies TF32.
_OLDEST_CAPABILITY = 8


class KVBackend:
    """One implementation of all arithmetic on packed keys and values.

    Attributes:
        name: as `resolve_backend` takes it.
        module: name under which results record the backend.
        encode: see `torch_ops.encode`.
        extend_attention: see `torch_ops.extend_attention`.
        rotate: see `torch_ops.rotate`.
        gelu: see `torch_ops.gelu`.
    """

    name: ClassVar[Backend]
    module: ClassVar[str]
    encode: ClassVar[Callable[..., tuple[Packed, Packed, Packed]]]
    extend_attention: ClassVar[Callable[..., Tensor]]
    rotate: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    gelu: ClassVar[Callable[..., Tensor]]

    def obstacle(self, device: torch.device) -> str | None:
        """The reason why this backend cannot run on a device; None if it can."""
        return None

    def new_counters(self, num_layers: int, batch_size: int, heads: int, device: torch.device) -> Tensor | None:
        """Scratch for `encode`, one row per layer; None if it needs none."""
        return None

    def prepare(self, codec: KVCodec, layers: Sequence[Packed]) -> None:
        """Computes at once, before an extension, what its layers need of protected tokens."""
        return None

    def pack_mask(self, mask: Tensor) -> Tensor | None:
        """A mask of columns, bool [B, L], in the form that `extend_attention` reads; None if it reads it as it is."""
        return None

    def compile_ahead(
        self, sizes: warmup.Sizes, codecs: Sequence[KVCodec], dtype: torch.dtype, device: torch.device
    ) -> int:
        """Compiles the kernels of a model's calls, see `warmup.compile_ahead`; 0 where there are none."""
        return 0


class TorchBackend(KVBackend):
    """PyTorch, on any device."""

    name = Backend.TORCH
    module = "torch_ops"
    encode = staticmethod(torch_ops.encode)
    extend_attention = staticmethod(torch_ops.extend_attention)
    rotate = staticmethod(torch_ops.rotate)
    gelu = staticmethod(torch_ops.gelu)


class ReferenceBackend(KVBackend):
    """The slow, plain implementation, on the CPU."""

    name = Backend.REFERENCE
    module = "reference"
    encode = staticmethod(reference.encode)
    extend_attention = staticmethod(reference.extend_attention)
    rotate = staticmethod(reference.rotate)
    gelu = staticmethod(reference.gelu)

    def obstacle(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"it runs on the CPU only, the model is on {device}"


class TritonBackend(KVBackend):
    """Triton kernels, and PyTorch for codecs without kernels. On the CPU they run in the interpreter, for tests."""

    name = Backend.TRITON
    module = "triton_kernels"
    encode = staticmethod(triton_encode.encode)
    extend_attention = staticmethod(triton_attention.extend_attention)
    rotate = staticmethod(triton_layer.rotate)
    gelu = staticmethod(triton_layer.gelu)

    def obstacle(self, device: torch.device) -> str | None:
        if not _TRITON_IS_INSTALLED:
            return f"triton is not installed ({install_hint('triton')})"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
            return None
        if device.type != "cuda" or torch.version.hip is not None:
            return f"it needs an NVIDIA GPU, the model is on {device}"
        properties = torch.cuda.get_device_properties(device)
        if properties.major < _OLDEST_CAPABILITY:
            found = f"{properties.major}.{properties.minor}"
            return f"it needs an NVIDIA GPU of compute capability {_OLDEST_CAPABILITY}.0 or newer, {device} has {found}"
        return None

    def new_counters(self, num_layers: int, batch_size: int, heads: int, device: torch.device) -> Tensor | None:
        return triton_encode.new_counters(num_layers, batch_size, heads, device)

    def prepare(self, codec: KVCodec, layers: Sequence[Packed]) -> None:
        triton_attention.prepare(codec, layers)

    def pack_mask(self, mask: Tensor) -> Tensor | None:
        return triton_attention.pack_mask(mask)

    def compile_ahead(
        self, sizes: warmup.Sizes, codecs: Sequence[KVCodec], dtype: torch.dtype, device: torch.device
    ) -> int:
        # The interpreter compiles nothing.
        return warmup.compile_ahead(sizes, codecs, dtype, device) if device.type == "cuda" else 0


_BACKENDS: dict[Backend, KVBackend] = {
    backend.name: backend for backend in (TritonBackend(), TorchBackend(), ReferenceBackend())
}


def resolve_backend(backend: str | Backend, device: torch.device | str) -> KVBackend:
    """Chooses a backend by its name and the model's device.

    Args:
        backend: `auto`, `triton`, `torch` or `reference`; only `auto` falls back. With `TRITON_INTERPRET=1` in the
            environment `triton` also runs on the CPU, slowly, for tests.
        device: of the model.

    Raises:
        ValueError: there is no such backend, or it cannot run on this device.
    """
    try:
        backend = Backend(backend)
    except ValueError:
        raise ValueError(f"`backend` must be one of {[b.value for b in Backend]}, got {backend!r}") from None
    device = torch.device(device)
    if backend is Backend.AUTO:
        # Triton's interpreter is slow, and only runs if asked for by name.
        fast = device.type == "cuda" and _BACKENDS[Backend.TRITON].obstacle(device) is None
        return _BACKENDS[Backend.TRITON if fast else Backend.TORCH]
    obstacle = _BACKENDS[backend].obstacle(device)
    if obstacle is not None:
        raise ValueError(f"backend '{backend}' cannot run: {obstacle}; use 'auto' or 'torch'")
    return _BACKENDS[backend]
