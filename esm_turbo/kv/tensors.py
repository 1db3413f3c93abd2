"""The tensors of a cache: their names, as in files, and what each has one entry for.

The cache itself has `lengths` [batch], `token_ids`, `positions` and `chains` [batch, columns] and `protected_columns`
[batch, slots]. A layer has `layers.N.packed.*` [batch, heads, columns, ...], `layers.N.protected.*`
[batch, heads, slots, head_dim] and `layers.N.rows.*` [batch, heads, 1, ...].
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Axis(enum.Enum):
    """Entries of a tensor in each row of the batch: one, or one per column or slot."""

    ROW = "row"
    COLUMN = "column"
    SLOT = "slot"


# In the order in which files list them. `positions` and `chains` may be absent.
OWN_TENSORS = {
    "lengths": Axis.ROW,
    "token_ids": Axis.COLUMN,
    "protected_columns": Axis.SLOT,
    "positions": Axis.COLUMN,
    "chains": Axis.COLUMN,
}
OWN_DTYPES = {
    "lengths": torch.int64,
    "token_ids": torch.uint8,
    "protected_columns": torch.int32,
    "positions": torch.int32,
    "chains": torch.int32,
}
LAYER_TENSORS = {"packed": Axis.COLUMN, "protected": Axis.SLOT, "rows": Axis.ROW}


@functools.cache
def layer_tensor(name: str) -> tuple[int, str, str]:
    """The layer, the group (see `LAYER_TENSORS`) and the name in it of a tensor that a layer has.

    Raises:
        ValueError: a layer has no tensor of this name.
    """
    parts = name.split(".", 3)
    if len(parts) != 4 or parts[0] != "layers" or parts[2] not in LAYER_TENSORS:
        raise ValueError(f"a cache has no tensor {name!r}")
    return int(parts[1]), parts[2], parts[3]


@functools.cache
def axis_of(name: str) -> Axis:
    """The entries that the tensor of a name has."""
    own = OWN_TENSORS.get(name)
    return LAYER_TENSORS[layer_tensor(name)[1]] if own is None else own


def layer_tensors(layers: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of layers (`TurboCacheLayer`) with their names."""
    for index, layer in enumerate(layers):
        for group in LAYER_TENSORS:
            for name, tensor in getattr(layer, group).items():
                yield f"layers.{index}.{group}.{name}", tensor


def dim_of(name: str) -> int:
    """The dimension of columns or slots."""
    return 1 if name in OWN_TENSORS else 2


def pad(tensor: Tensor, dim: int, size: int, value: int = 0) -> Tensor:
    """The tensor with entries of `value` after its own, `size` in all along a dimension."""
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_full(shape, value)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


def with_room(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A copy of a tensor at the beginning of a buffer of zeros, with room for `size` entries along a dimension."""
    return pad(tensor, dim, size).narrow(dim, 0, tensor.shape[dim])


def into_room(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The first `size` entries of the buffer of a tensor that `with_room` made."""
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.as_strided(shape, tensor.stride())


def no_tokens(batch_size: int, device: torch.device | str) -> dict[str, Tensor]:
    """The tensors of a cache of empty rows to which nothing has been appended."""
    return {
        "lengths": torch.zeros(batch_size, dtype=torch.int64, device=device),
        "token_ids": torch.zeros(batch_size, 0, dtype=torch.uint8, device=device),
        "protected_columns": torch.zeros(batch_size, 0, dtype=torch.int32, device=device),
    }


def entry_bytes(name: str, tensor: Tensor) -> int:
    """Bytes per row, token or slot."""
    if name in OWN_TENSORS:
        return tensor.element_size()
    return tensor.nbytes // (tensor.shape[0] * tensor.shape[2]) if tensor.numel() else 0


def cat_rows(name: str, parts: list[Tensor]) -> Tensor:
    """The rows of several caches, padded to a common number of columns or slots."""
    # What is stored per row may be longer for a longer row.
    dims = range(3, parts[0].dim()) if axis_of(name) is Axis.ROW else [dim_of(name)]
    for dim in dims:
        size = max(part.shape[dim] for part in parts)
        parts = [pad(part, dim, size, -1 if name == "protected_columns" else 0) for part in parts]
    return torch.cat(parts)
