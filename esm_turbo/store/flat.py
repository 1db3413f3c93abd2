"""A context in one buffer, so that it is read, checked and moved as a whole.

The cache of a large model consists of about two hundred small tensors. As views of one buffer they need one read from
disk, one checksum, one copy into pinned memory and one copy to the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs import KVCodec
from esm_turbo.codecs.transfers import to_host
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.identity import ModelIdentity
from esm_turbo.kv.tensors import Axis, axis_of, dim_of
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.ops.copies import Cutter

# Tensors begin at multiples of this number of bytes: enough for every dtype, and for wide loads on devices.
_ALIGNMENT = 64
_REQUIRED = ("lengths", "token_ids", "protected_columns")
# Bytes that are copied to the host at a time, twice which it holds in pinned memory.
_COPIED_BYTES = 64 << 20


@dataclass(frozen=True)
class ContextSpec:
    """Kind of contexts: everything that they have in common besides tensors.

    Attributes:
        config: options under which they are stored.
        geometry: of the model.
        identity: of the model, with the precision of its computations.
        codec: reads them.
        model: name of the model.
    """

    config: TurboConfig
    geometry: Geometry
    identity: ModelIdentity
    codec: KVCodec
    model: str


@dataclass(frozen=True)
class Part:
    """A tensor of a context within the buffer.

    Attributes:
        name: such as `lengths` or `layers.3.packed.keys`.
        dtype: of the tensor.
        shape: of the tensor.
        start: offset in the buffer in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FlatContext:
    """The context of one protein.

    Attributes:
        buffer: all tensors, uint8 [nbytes].
        parts: location of each of them.
    """

    buffer: Tensor
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, cache: TurboKVCache) -> FlatContext:
        """Copies a cache of one row, on its device."""
        tensors = dict(cache.named_tensors())
        parts = layout([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
        buffer = torch.zeros(total_bytes(parts), dtype=torch.uint8, device=cache.device)
        for part, view in zip(parts, _views(buffer, parts), strict=True):
            view.copy_(tensors[part.name])
        return cls(buffer, parts)

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    def to(self, device: torch.device) -> FlatContext:
        """Copies to a device; from pinned memory asynchronously."""
        return FlatContext(self.buffer.to(device, non_blocking=True), self.parts)

    def clone(self) -> FlatContext:
        """Copies on the same device."""
        return FlatContext(self.buffer.clone(), self.parts)

    def in_memory(self, *, pinned: bool) -> FlatContext:
        """Copies into the host's memory.

        Args:
            pinned: use page-locked memory, which a CUDA device reads at full speed.
        """
        host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        return FlatContext(host.copy_(self.buffer), self.parts)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, views of the buffer."""
        return dict(zip((part.name for part in self.parts), _views(self.buffer, self.parts), strict=True))

    @classmethod
    def empty(cls, parts: tuple[Part, ...], device: torch.device) -> FlatContext:
        """Zeros in place of these tensors. They can be written into, in any mode."""
        with torch.inference_mode(mode=False):
            return cls(torch.zeros(total_bytes(parts), dtype=torch.uint8, device=device), parts)

    def cache(self, spec: ContextSpec) -> TurboKVCache:
        """The cache, whose tensors are views of the buffer; they must not be written into."""
        return TurboKVCache.from_tensors(spec.config, spec.geometry, spec.identity, spec.codec, self.tensors())

    def description(self) -> list[list[Any]]:
        """Names, dtypes and shapes of the tensors, JSON values; see `from_description`."""
        return [[part.name, str(part.dtype).removeprefix("torch."), list(part.shape)] for part in self.parts]

    @classmethod
    def from_description(cls, buffer: Tensor, description: Sequence[Sequence[Any]]) -> FlatContext:
        """A context of a buffer and its `description`.

        Raises:
            ValueError: they do not fit together.
        """
        try:
            parts = layout([(name, _dtype(dtype), tuple(map(int, shape))) for name, dtype, shape in description])
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not the description of a context: {error}") from error
        names = {part.name for part in parts}
        if buffer.dtype != torch.uint8 or buffer.shape != (total_bytes(parts),) or not names.issuperset(_REQUIRED):
            raise ValueError("tensors and description do not fit together")
        return cls(buffer, parts)


@dataclass(frozen=True)
class FlatBatch:
    """The contexts of a batch, one after the other in one buffer: hundreds of tensors of each are copied at once.

    Attributes:
        buffer: all contexts, uint8 [nbytes].
        contexts: the rows of the batch, views of the buffer.
        ready: when they are there, for other streams of a CUDA device.
    """

    buffer: Tensor
    contexts: tuple[FlatContext, ...]
    ready: torch.cuda.Event | None = None

    @classmethod
    def of(cls, cache: TurboKVCache, lengths: Sequence[int]) -> FlatBatch:
        """Copies the rows of a cache, on its device; as `FlatContext.of` each row that `TurboKVCache.cut` gives.

        Args:
            cache: of any rows.
            lengths: tokens per row: those of the cache, which the caller knows.
        """
        named = dict(cache.named_tensors())
        if any(x.device != cache.device for x in named.values()) or not _all_slots_stay(cache, lengths):
            contexts = [FlatContext.of(row) for row in cache.cut(lengths)]
            return cls._of(torch.cat([context.buffer for context in contexts]), [one.parts for one in contexts])
        dims = [dim_of(name) if axis_of(name) is Axis.COLUMN else None for name in named]
        kinds = [(name, x.dtype, x.shape[1:], dim) for (name, x), dim in zip(named.items(), dims, strict=True)]
        # Rows of one length share their layout.
        layouts = {
            length: layout(
                [
                    (name, dtype, (1, *shape) if dim is None else (1, *shape[: dim - 1], length, *shape[dim:]))
                    for name, dtype, shape, dim in kinds
                ]
            )
            for length in set(lengths)
        }
        rows = [layouts[length] for length in lengths]
        starts = list(accumulate(map(total_bytes, rows), initial=0))
        buffer = _zeros(starts.pop(), cache.device)
        offsets = np.array([[part.start for part in parts] for parts in rows]) + np.array(starts)[:, None]
        Cutter(list(named.values()), dims).into(buffer, lengths, offsets)
        return cls._of(buffer, rows)

    @classmethod
    def _of(cls, buffer: Tensor, rows: Sequence[tuple[Part, ...]]) -> FlatBatch:
        """A batch of contexts that were launched into a buffer, given by their parts."""
        pieces = buffer.split([total_bytes(parts) for parts in rows])
        contexts = tuple(FlatContext(piece, parts) for piece, parts in zip(pieces, rows, strict=True))
        on_cuda = buffer.device.type == "cuda"
        return cls(buffer, contexts, torch.cuda.current_stream(buffer.device).record_event() if on_cuda else None)

    def on_host(self) -> Iterator[FlatContext]:
        """The contexts in the host's memory; from a CUDA device in few large copies, of which one runs ahead.

        They wait for nothing that was launched after the batch was made, and may be asked for in any thread.
        """
        if self.ready is None:
            yield from self.contexts
            return
        stream, start = torch.cuda.Stream(self.buffer.device), 0
        stream.wait_event(self.ready)
        self.buffer.record_stream(stream)
        ahead: deque[tuple[list[FlatContext], Tensor, torch.cuda.Event]] = deque()
        for group in self._groups():
            end = start + sum(context.nbytes for context in group)
            with torch.cuda.stream(stream):
                copied = to_host(self.buffer[start:end])
            ahead.append((group, copied, stream.record_event()))
            start = end
            if len(ahead) > 1:
                yield from _arrived(*ahead.popleft())
        for one in ahead:
            yield from _arrived(*one)

    def _groups(self) -> Iterator[list[FlatContext]]:
        """The contexts in groups that are copied at once."""
        group: list[FlatContext] = []
        left = _COPIED_BYTES
        for context in self.contexts:
            if group and context.nbytes > left:
                yield group
                group, left = [], _COPIED_BYTES
            group.append(context)
            left -= context.nbytes
        if group:
            yield group


def _arrived(group: list[FlatContext], copied: Tensor, done: torch.cuda.Event) -> Iterator[FlatContext]:
    """Contexts of a device in the host's memory, where they were copied one after the other."""
    done.synchronize()
    parts = copied.split([context.nbytes for context in group])
    return (FlatContext(part, context.parts) for part, context in zip(parts, group, strict=True))


def _zeros(size: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # Fresh memory is zero already, which `torch.zeros` does not know.
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _all_slots_stay(cache: TurboKVCache, lengths: Sequence[int]) -> bool:
    """True if every row, alone, would keep all slots of the batch for protected tokens."""
    slots = cache.protected_columns.shape[1]
    if cache.device.type != "cpu":
        # Known without waiting for the device: a batch has no more than a row of as many columns.
        return slots <= min(lengths, default=0)
    return bool(((cache.protected_columns >= 0).sum(1) == slots).all())


def layout(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[Part, ...]:
    """Lays out tensors, given by name, dtype and shape, one after the other."""
    parts, start = [], 0
    for name, dtype, shape in tensors:
        part = Part(name, dtype, shape, start)
        parts.append(part)
        start += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(parts)


def _views(buffer: Tensor, parts: Sequence[Part]) -> Iterator[Tensor]:
    for part in parts:
        yield buffer.narrow(0, part.start, part.nbytes).view(part.dtype).view(part.shape)


def total_bytes(parts: Sequence[Part]) -> int:
    """Bytes of a buffer for all of these."""
    return parts[-1].start + -(-parts[-1].nbytes // _ALIGNMENT) * _ALIGNMENT if parts else 0


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype
