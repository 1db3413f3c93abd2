"""Copies of many tensors in one launch: the tensors of a cache are hundreds, and most are small."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.ops.triton_launch import interpreted

__all__ = ["Cutter", "Rows", "copy_rows"]

_BLOCK = 1024
_WORD = 4
_ALIGNMENT = 64
# Programs per tensor.
_PROGRAMS = 32


class Rows:
    """Tensors [..., rows, n, ...] as rows of bytes, from the dimension `dim` on; where they lie, for a kernel.

    Args:
        tensors: of one device; contiguous from `dims` on. Those before are one dimension of equal strides, or copied.
        dims: first dimension within a row, of each tensor.

    Attributes:
        tensors: as given, or contiguous copies.
        device: of the tensors.
        words: whether all numbers are multiples of four bytes.
        copied: whether a tensor had to be copied.
    """

    def __init__(self, tensors: Sequence[Tensor], dims: Sequence[int]) -> None:
        self.tensors: list[Tensor] = []
        entries: list[list[int]] = []
        for tensor, dim in zip(tensors, dims, strict=True):
            made = tensor if _has_rows(tensor, dim) else tensor.contiguous()
            self.tensors.append(made)
            size = made.element_size()
            count = made.shape[:dim].numel()
            length = made.shape[dim:].numel() * size
            entries.append([made.data_ptr(), count, length, made.stride(dim - 1) * size if dim else length])
        self.copied = any(a is not b for a, b in zip(tensors, self.tensors, strict=True))
        self.words = all(number % _WORD == 0 for entry in entries for number in (entry[0], *entry[2:]))
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self._entries = np.array(entries, dtype=np.int64).reshape(-1, 4)

    @functools.cached_property
    def table(self) -> Tensor:
        """Address, rows, bytes per row, and bytes from one row to the next, int64 [tensors, 4] on the device.

        Made by the first copy, on its stream; copies on others have to follow it.
        """
        return _on_device(self._entries, self.device)


def _has_rows(tensor: Tensor, dim: int) -> bool:
    """Whether a tensor is contiguous from `dim` on, and the dimensions before have one stride."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[dim:]), reversed(tensor.stride()[dim:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    step = None
    for size, stride in zip(reversed(tensor.shape[:dim]), reversed(tensor.stride()[:dim]), strict=True):
        if step is not None and size != 1 and stride != step:
            return False
        step = (stride if step is None else step) * size
    return True


def copy_rows(sources: Rows, targets: Rows) -> None:
    """Copies every source to the beginning of its target's rows: `target[:n_0, :n_1, ...] = source`.

    The rest becomes zero, so that nothing of earlier contents is left, such as an infinity that attention would weigh
    with 0. One launch on CUDA; a plain loop elsewhere. A target's rows may be longer than its source's, and more;
    dimensions within a row are the same but the first. Targets are not inference tensors.
    """
    if sources.device.type == "cpu" and not interpreted():
        for source, target in zip(sources.tensors, targets.tensors, strict=True):
            target.zero_()
            target[tuple(map(slice, source.shape))] = source
        return
    assert len(sources.tensors) == len(targets.tensors)
    _launch(sources.table, targets.table, sources.words and targets.words)
    torch.autograd.graph.increment_version(targets.tensors)


class Cutter:
    """Cuts rows out of the tensors of a batch: the first entries of one row of each, together in one allocation.

    Args:
        tensors: [batch, ...] or, with columns, [batch, heads, columns, ...] or [batch, columns]; of one device.
        dims: dimension of the columns; None for a tensor without columns, which is cut as a whole.

    Attributes:
        given: the tensors.
        copied: whether one of them had to be copied.
    """

    def __init__(self, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> None:
        self.given, self.dims = list(tensors), list(dims)
        self.tensors = [
            x if _has_rows(x, dim or 1) else x.contiguous() for x, dim in zip(tensors, self.dims, strict=True)
        ]
        self.copied = any(a is not b for a, b in zip(self.given, self.tensors, strict=True))
        self.device = self.tensors[0].device
        entries = []
        for x, dim in zip(self.tensors, self.dims, strict=True):
            size, first = x.element_size(), dim or 1
            entry = x.shape[first:].numel() if dim is None else x.shape[first + 1 :].numel()
            # Bytes to the batch's next row; heads, and bytes from one to the next; bytes of a column, or of all.
            strides = x.stride(0) * size, x.stride(1) * size if first > 1 else 0
            entries.append([x.data_ptr(), strides[0], x.shape[1:first].numel(), strides[1], entry * size])
        self._table = np.array(entries, dtype=np.int64).T
        self._has_columns = np.array([dim is not None for dim in self.dims])

    def __call__(self, row: int, length: int) -> list[Tensor]:
        """The first `length` columns of a row, [1, ...] each: views of one buffer."""
        address, batch_stride, heads, head_stride, entry = self._table
        lengths = np.where(self._has_columns, entry * length, entry)
        sizes = heads * lengths
        # Every view begins where any dtype may.
        padded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(int(padded.sum()), dtype=torch.uint8, device=self.device)
        bounds = np.stack([sizes, padded - sizes], axis=1).ravel().tolist()
        cut = []
        for x, dim, part in zip(self.tensors, self.dims, buffer.split(bounds)[::2], strict=True):
            shape = x.shape[1:] if dim is None else (*x.shape[1:dim], length, *x.shape[dim + 1 :])
            cut.append(part.view(x.dtype).view(1, *shape))
        if self.device.type == "cpu" and not interpreted():
            for x, dim, view in zip(self.tensors, self.dims, cut, strict=True):
                one = x[row : row + 1]
                view.copy_(one if dim is None else one.narrow(dim, 0, length))
            return cut
        sources = np.stack([address + row * batch_stride, heads, lengths, head_stride], axis=1)
        targets = np.stack([buffer.data_ptr() + np.cumsum(padded) - padded, heads, lengths, lengths], axis=1)
        both = np.stack([sources, targets])
        words = not (both[..., [0, 2, 3]] % _WORD).any()
        source, target = _on_device(both, self.device)
        _launch(source, target, words)
        return cut


def _on_device(table: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    host = torch.from_numpy(table)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _launch(sources: Tensor, targets: Tensor, words: bool) -> None:
    from esm_turbo.ops.kernels import copies as kernels

    kernels.copy_rows[(len(sources), _PROGRAMS)](
        source_ptr=sources, target_ptr=targets, UNIT=_WORD if words else 1, BLOCK=_BLOCK, num_warps=4
    )
