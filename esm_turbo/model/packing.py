"""Rows packed along one dimension without padding (Dao 2023), and the attention of packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.transfers import to_device
from esm_turbo.model.sequences import SequenceBounds
from esm_turbo.model.sessions import KVSession
from esm_turbo.ops.triton_encoder import SeenKeys

DTYPES = (torch.bfloat16, torch.float16)
"""Of models that run on packed tokens."""


@dataclass(frozen=True)
class Packing:
    """The places of a padded batch's tokens when its rows are packed one after the other.

    Attributes:
        batch_size: rows.
        width: columns of the padded batch.
        longest: tokens of the longest row.
        positions: of every token in its row, int32 [T].
        offsets: of every row's first token, and T, int32 [rows + 1].
        index: of every token in the flattened padded batch, int32 [T]; None where there is no padding.
        slots: for every place of the padded batch the token that lies there, 0 for padding, int32 [rows * width]; None
            where there is no padding.
        elsewhere: copies on other devices.
    """

    batch_size: int
    width: int
    longest: int
    positions: Tensor
    offsets: Tensor
    index: Tensor | None
    slots: Tensor | None
    elsewhere: dict[torch.device, Packing] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> Packing:
        """The packing of rows of these lengths, padded on the right to `width` columns; one copy to the device."""
        rows = np.asarray(lengths, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(rows)])
        row = np.repeat(np.arange(len(rows)), rows)
        positions = np.arange(offsets[-1]) - offsets[:-1][row]
        parts = [positions, offsets]
        padded = bool((rows < width).any())
        if padded:
            column = np.arange(width)
            # Padding repeats a token of its own row: another may hold what is not finite.
            slots = offsets[:-1, None] + np.where(column < rows[:, None], column, 0)
            parts += [row * width + positions, slots.ravel()]
        host = torch.from_numpy(np.concatenate(parts).astype(np.int32))
        on_device = to_device(host, device).split([len(part) for part in parts])
        index, slot = on_device[2:] if padded else (None, None)
        return cls(len(rows), width, int(rows.max()), on_device[0], on_device[1], index, slot)

    def sequences(self, bounds: SequenceBounds) -> tuple[Packing, SeenKeys]:
        """The packing of sequences as if each were a row, and the keys that it sees with those of all before it.

        Args:
            bounds: of the sequences of every row.
        """
        starts = np.cumsum([0, *(row[-1][1] for row in bounds.rows)])
        firsts = [int(start) for start, row in zip(starts, bounds.rows, strict=False) for _ in row]
        lengths = [end - begin for _, begin, end in bounds]
        seen = [end for _, _, end in bounds]
        host = torch.tensor([*firsts, int(starts[-1]), *seen], dtype=torch.int32)
        first, count = to_device(host, self.offsets.device).split([len(firsts) + 1, len(seen)])
        packing = Packing.of(lengths, max(lengths), self.offsets.device)
        return packing, SeenKeys(first, count, max(seen))

    def on(self, device: torch.device) -> Packing:
        """The same packing on a device, copied there once."""
        if self.offsets.device == device:
            return self
        if device not in self.elsewhere:
            names = ("positions", "offsets", "index", "slots")
            moved = {name: x.to(device) for name in names if (x := getattr(self, name)) is not None}
            self.elsewhere[device] = replace(self, **moved, elsewhere={})
        return self.elsewhere[device]

    def pack(self, x: Tensor) -> Tensor:
        """[rows, width, ...] as [T, ...]."""
        flat = x.flatten(0, 1)
        # Kernels read rows one after the other.
        return flat.contiguous() if self.index is None else flat.index_select(0, self.index)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, ...] as [rows, width, ...], on the device of x; padding repeats the first token."""
        slots = self.on(x.device).slots
        flat = x if slots is None else x.index_select(0, slots)
        return flat.view(self.batch_size, self.width, *x.shape[1:])


Attend = Callable[[int, Tensor], Tensor]
"""Attention of a layer: its index, and scaled queries, keys and values, after RoPE, [T, 3, heads, head_dim], give
[T, heads * head_dim]."""


class _LayerSessions(Protocol):
    """The part of a `ForwardPlan` that attention of packed tokens needs: see there."""

    @property
    def bounds(self) -> SequenceBounds | None: ...

    def sees_whole_rows(self, layer_idx: int) -> bool: ...

    def sees_earlier(self, layer_idx: int) -> bool: ...

    def session_at(self, layer_idx: int) -> KVSession | None: ...

    def stored_index(self, layer_idx: int) -> int: ...

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


def attention_of_rows(packing: Packing, ops: ModuleType, plan: _LayerSessions) -> Attend:
    """Attention of every row's tokens to each other, as far as layers see.

    Args:
        packing: of the rows.
        ops: `triton_encoder`, or another module with its operations.
        plan: its session is shown the keys and values of every layer that is stored, as a padded batch.
    """
    sequences, earlier = (packing, None) if plan.bounds is None else packing.sequences(plan.bounds)

    def attend(layer_idx: int, qkv: Tensor) -> Tensor:
        session = plan.session_at(layer_idx)
        if session is not None:
            keys, values = (x.transpose(1, 2) for x in packing.unpack(qkv[:, 1:]).unbind(2))
            session.attend(plan.stored_index(layer_idx), keys, keys, values)
        rows = packing if plan.sees_whole_rows(layer_idx) else sequences
        seen = earlier.on(qkv.device) if earlier is not None and plan.sees_earlier(layer_idx) else None
        attended: Tensor = ops.attend(qkv, rows.on(qkv.device).offsets, rows.longest, seen)
        return attended.flatten(1)

    return attend


def attention_to_cache(plan: _LayerSessions, batch_size: int) -> Attend:
    """Attention of the tokens of `batch_size` rows of equal length to each other, and in stored layers to a cache."""

    def attend(layer_idx: int, qkv: Tensor) -> Tensor:
        heads = qkv.view(batch_size, -1, *qkv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()
        session = plan.session_at(layer_idx)
        if session is None:
            output: Tensor | None = plan.attend(layer_idx, *heads)
        else:
            output = session.attend(plan.stored_index(layer_idx), *heads)
        assert output is not None
        return output.transpose(1, 2).reshape(len(qkv), -1)

    return attend
