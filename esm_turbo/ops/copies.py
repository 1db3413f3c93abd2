"""Copies of many tensors in one launch: the tensors of a cache are hundreds, and most are small."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.transfers import to_device
from esm_turbo.ops.triton_launch import Options, interpreted, launch

__all__ = ["ByteRows", "CutRow", "Cutter", "Gatherer", "copy_rows"]

_BLOCK = 1024
_WORD = 4
_ALIGNMENT = 64
# Programs per tensor.
_PROGRAMS = 32


class ByteRows:
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
    """True if a tensor is contiguous from `dim` on, and the dimensions before have one stride."""
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


def copy_rows(sources: ByteRows, targets: ByteRows) -> None:
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
    launch_copies(sources.table, targets.table, sources.words and targets.words)
    torch.autograd.graph.increment_version(targets.tensors)


class _Group(NamedTuple):
    """Tensors of one shape and dtype, which a cut lays out one after the other.

    Attributes:
        members: indices of the tensors.
        shape: of a row, with -1 for the columns.
        dtype: of the tensors.
        bytes: of a row, or of one column of it.
    """

    members: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    def step(self, length: int) -> int:
        """Bytes from one member to the next: every one begins where any dtype may."""
        size = self.bytes * (length if -1 in self.shape else 1)
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: Tensor, start: int, length: int, count: int) -> tuple[Tensor, ...]:
        """The parts of `count` members one after the other in a buffer of bytes, from `start` on."""
        shape = [length if size == -1 else size for size in self.shape]
        size = self.dtype.itemsize
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        # One view of all, and one call that splits it: a view each takes four times as long.
        return (
            buffer.view(self.dtype)
            .as_strided((count, *shape), (self.step(length) // size, *strides), start // size)
            .unbind()
        )


class _Layout:
    """The layout of a cut row's buffer, group by group; rows of one length share it. It refers to no tensor.

    Attributes:
        groups: as given.
        length: as given.
        starts: where each group begins, and the size of the buffer.
        offsets: where each tensor begins, int64 [tensors].
    """

    def __init__(self, groups: Sequence[_Group], length: int) -> None:
        self.groups, self.length = groups, length
        self.starts = list(accumulate((group.step(length) * len(group.members) for group in groups), initial=0))
        self.offsets = np.empty(sum(len(group.members) for group in groups), dtype=np.int64)
        for group, start in zip(groups, self.starts, strict=False):
            self.offsets[group.members] = start + group.step(length) * np.arange(len(group.members))


class CutRow:
    """A row that a `Cutter` cut out of a batch: its tensors in one buffer, as views that are made when asked for.

    Hundreds of views take the host longer than the device takes to cut the row.
    """

    __slots__ = ("_buffer", "_layout")

    def __init__(self, buffer: Tensor, layout: _Layout) -> None:
        self._buffer, self._layout = buffer, layout

    def tensor(self, index: int) -> Tensor:
        """One of the tensors."""
        layout = self._layout
        [group] = [group for group in layout.groups if index in group.members]
        [view] = group.views(self._buffer, int(layout.offsets[index]), layout.length, 1)
        return view

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which the cutter got them."""
        layout, views = self._layout, dict[int, Tensor]()
        for group, start in zip(layout.groups, layout.starts, strict=False):
            split = group.views(self._buffer, start, layout.length, len(group.members))
            views.update(zip(group.members, split, strict=True))
        return [views[index] for index in range(len(views))]


class Gatherer:
    """Reads elements of many tensors, one after the other into the same tensor; one launch on CUDA.

    Args:
        views: [elements] each, of one dtype and device.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        sizes = [len(view) for view in views]
        self._sources = ByteRows(views, [1] * len(views))
        assert not self._sources.copied
        with torch.inference_mode(False):
            self._gathered = views[0].new_empty(sum(sizes))
        self._targets = ByteRows(self._gathered.split(sizes), [1] * len(views))

    def __call__(self) -> Tensor:
        """All elements; the next call overwrites them."""
        sources, targets = self._sources, self._targets
        if sources.device.type == "cpu" and not interpreted():
            torch.cat(sources.tensors, out=self._gathered)
        else:
            launch_copies(sources.table, targets.table, sources.words and targets.words)
        return self._gathered

    def begin(self) -> Callable[[Tensor], bool]:
        """Remember what the device has been asked for until now.

        Returns:
            Tells whether all elements, as they are after that, are equal to those given. It does not wait for what the
            device is asked for later.
        """
        device = self._sources.device
        if device.type != "cuda":
            return lambda expected: torch.equal(self(), expected)
        asked = torch.cuda.current_stream(device).record_event()

        def is_same(expected: Tensor) -> bool:
            self._beside.wait_event(asked)
            with torch.cuda.stream(self._beside):
                return torch.equal(self(), expected)

        return is_same

    @functools.cached_property
    def _beside(self) -> torch.cuda.Stream:
        """A stream beside that of forwards."""
        return torch.cuda.Stream(self._sources.device)


class Cutter:
    """Cuts a batch into its rows: the first entries of each tensor, those of a row together in one allocation.

    Args:
        tensors: [batch, ...] or, with columns, [batch, heads, columns, ...] or [batch, columns]; of one device.
        dims: dimension of the columns; None for a tensor without columns, which is cut as a whole.

    Attributes:
        copied: whether one of the tensors had to be copied.
    """

    def __init__(self, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> None:
        self.dims = list(dims)
        self.tensors, addresses, entries = list[Tensor](), list[int](), list[tuple[int, ...]]()
        groups = dict[Any, _Group]()
        # Layers are alike: what depends on shape and strides is worked out once for all.
        known = dict[Any, tuple[bool, tuple[int, ...], list[int]]]()
        for index, (given, dim) in enumerate(zip(tensors, self.dims, strict=True)):
            kind = given.shape, given.stride(), given.dtype, dim
            if kind not in known:
                known[kind] = self._described(given, dim, groups)
            has_rows, entry, members = known[kind]
            x = given if has_rows else given.contiguous()
            self.tensors.append(x)
            addresses.append(x.data_ptr())
            entries.append(entry)
            members.append(index)
        self.copied = any(a is not b for a, b in zip(tensors, self.tensors, strict=True))
        self.device = self.tensors[0].device
        self._groups = list(groups.values())
        self._addresses = np.array(addresses, dtype=np.int64)
        self._table = np.array(entries, dtype=np.int64).T
        self._has_columns = np.array([dim is not None for dim in self.dims])

    @staticmethod
    def _described(x: Tensor, dim: int | None, groups: dict[Any, _Group]) -> tuple[bool, tuple[int, ...], list[int]]:
        """True if a tensor can be read as it is; strides, heads and bytes for the table; the members of its group."""
        first = dim or 1
        if not (has_rows := _has_rows(x, first)):
            x = x.contiguous()
        size = x.element_size()
        entry = x.shape[first:].numel() if dim is None else x.shape[first + 1 :].numel()
        # Bytes to the batch's next row; heads, and bytes from one to the next; bytes of a column, or of all.
        strides = x.stride(0) * size, x.stride(1) * size if first > 1 else 0
        heads = x.shape[1:first].numel()
        shape = (1, *x.shape[1:]) if dim is None else (1, *x.shape[1:dim], -1, *x.shape[dim + 1 :])
        group = groups.setdefault((shape, x.dtype), _Group([], shape, x.dtype, heads * entry * size))
        return has_rows, (strides[0], heads, strides[1], entry * size), group.members

    def __call__(self, lengths: Sequence[int]) -> list[CutRow]:
        """The first `lengths[i]` columns of row i, tensors [1, ...] in a buffer for each row. One launch on CUDA."""
        layouts = {length: _Layout(self._groups, length) for length in set(lengths)}
        own = [layouts[length] for length in lengths]
        buffers = [torch.empty(layout.starts[-1], dtype=torch.uint8, device=self.device) for layout in own]
        cuts = [CutRow(buffer, layout) for buffer, layout in zip(buffers, own, strict=True)]
        if not cuts:
            return cuts
        if self.device.type == "cpu" and not interpreted():
            for row, (cut, length) in enumerate(zip(cuts, lengths, strict=True)):
                for x, dim, view in zip(self.tensors, self.dims, cut.tensors(), strict=True):
                    one = x[row : row + 1]
                    view.copy_(one if dim is None else one.narrow(dim, 0, length))
            return cuts
        begins = np.array([buffer.data_ptr() for buffer in buffers])[:, None]
        self._launch(lengths, begins + np.stack([layout.offsets for layout in own]))
        return cuts

    def into(self, buffer: Tensor, lengths: Sequence[int], offsets: npt.NDArray[np.int64]) -> None:
        """As a call, but copies all rows into one buffer of the caller's.

        Args:
            buffer: bytes, contiguous; newly made, so that no graph of autograd knows what was in it.
            lengths: columns of each row, as for a call.
            offsets: where each tensor of each row begins, int64 [rows, tensors]; multiples of any dtype's size.
        """
        if self.device.type != "cpu" or interpreted():
            if len(lengths):
                self._launch(lengths, buffer.data_ptr() + offsets)
            return
        typed = {x.dtype: buffer.view(x.dtype) for x in self.tensors}
        for row, length in enumerate(lengths):
            for x, dim, offset in zip(self.tensors, self.dims, offsets[row].tolist(), strict=True):
                one = x[row] if dim is None else x[row].narrow(dim - 1, 0, length)
                typed[x.dtype].narrow(0, offset // x.element_size(), one.numel()).view(one.shape).copy_(one)

    def _launch(self, lengths: Sequence[int], addresses: npt.NDArray[np.int64]) -> None:
        """Copies the first columns of every row to these addresses, [rows, tensors]."""
        batch_stride, heads, head_stride, entry = self._table
        rows = np.arange(len(lengths))[:, None]
        sizes = np.where(self._has_columns, entry * np.array(lengths)[:, None], entry)
        sources = np.broadcast_arrays(self._addresses + rows * batch_stride, heads, sizes, head_stride)
        targets = np.broadcast_arrays(addresses, heads, sizes, sizes)
        both = np.stack([np.stack(sources, axis=-1), np.stack(targets, axis=-1)]).reshape(2, -1, 4)
        words = ~(both[..., [0, 2, 3]] % _WORD).any(axis=(0, 2))
        for chosen, are_words in ((words, True), (~words, False)):
            if chosen.any():
                source, target = _on_device(np.ascontiguousarray(both[:, chosen]), self.device)
                launch_copies(source, target, are_words)


def _on_device(table: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(table), device)


def launch_copies(sources: Tensor, targets: Tensor, words: bool) -> None:
    from esm_turbo.ops.kernels import copies as kernels

    launch(
        kernels.copy_rows,
        (len(sources), _PROGRAMS, 1),
        sources.device,
        Options(num_warps=4),
        source_ptr=sources,
        target_ptr=targets,
        UNIT=_WORD if words else 1,
        BLOCK=_BLOCK,
    )
