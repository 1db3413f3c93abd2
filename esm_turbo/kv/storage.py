"""Storage of a cache: its tensors by name, and spare columns that appends are written into."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from esm_turbo.kv.layer import TurboCacheLayer
from esm_turbo.kv.tensors import (
    OWN_TENSORS,
    Axis,
    axis_of,
    dim_of,
    into_room,
    layer_tensor,
    layer_tensors,
    no_tokens,
    with_room,
)

_Made = TypeVar("_Made")
_Parts = Sequence[tuple[Sequence[str], Callable[[], Sequence[Tensor]]]]
# Columns are allocated in multiples of this.
_CAPACITY_STEP = 16


class _Unmade(NamedTuple):
    """Layers of a cache that was cut out of a batch, of which nobody has asked for a tensor yet.

    Attributes:
        parts: of the cache's tensors, one for each device: their names, and what makes them.
        num_layers: of the model.
    """

    parts: _Parts
    num_layers: int

    def layers(self) -> list[TurboCacheLayer]:
        layers = [TurboCacheLayer() for _ in range(self.num_layers)]
        for names, make in self.parts:
            _put(layers, zip(names, make(), strict=True))
        return layers


class CacheStorage(Cache):
    """Named tensors, replaced as a whole or written beyond each row's tokens.

    Appends are written into spare columns, so that they do not copy what is stored. Only the cache that allocated a
    tensor writes into it, and only as long as no other cache shares it: of two caches that share tensors, the first
    append to either copies them. Everything else replaces tensors.

    Attributes:
        lengths, token_ids, positions, chains, protected_columns: see `TurboKVCache`.
        descriptions: what is known about where the tensors lie; forgotten as soon as one is replaced.
    """

    lengths: Tensor
    token_ids: Tensor
    positions: Tensor | None
    chains: Tensor | None
    protected_columns: Tensor
    descriptions: dict[str, Any]

    def __init__(self, num_layers: int, device: torch.device | str) -> None:
        super().__init__(layers=[])
        self._unmade: _Unmade | None = None
        # Columns that this cache may write, 0 if it shares its tensors, and columns that have been written.
        self._capacity = self._written = 0
        # Of the longest row, where it is known.
        self._seq_length: int | None = None
        self.layers = [TurboCacheLayer() for _ in range(num_layers)]
        self._set_tensors(no_tokens(0, device))

    # The attribute of the instance, once there is one, takes its place.
    @functools.cached_property
    def layers(self) -> list[TurboCacheLayer]:
        """The tensors of each layer of the model. A cache that was cut out of a batch makes them when first used."""
        if (unmade := self._unmade) is not None:
            # All of several threads get what the first one made.
            self.__dict__.setdefault("layers", unmade.layers())
            # It would keep a buffer whose tensors may be replaced.
            self._unmade = None
        layers: list[TurboCacheLayer] = self.__dict__["layers"]
        return layers

    def __copy__(self) -> Self:
        """Copies the cache, but not its tensors. The next append to either copies those."""
        self._capacity = 0
        return self._with(lambda tensor: tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies the cache and its tensors, without spare columns."""
        return self._with(torch.clone)

    def __getstate__(self) -> dict[str, Any]:
        # A view would be pickled with all of the tensor that it is a part of.
        return self._with(torch.clone).__dict__

    def _with(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A cache of a function of each tensor, which it must not write into in place."""
        tensors = {name: function(tensor) for name, tensor in self.named_tensors()}
        made = self._without_tensors()
        made.layers = self.layers
        made._set_tensors(tensors)
        made._seq_length = self._seq_length
        return made

    def _with_layers_later(self, own: Mapping[str, Tensor], parts: _Parts) -> Self:
        """A cache of other tensors, of which those of the layers are made when first used.

        Args:
            own: those that no layer has.
            parts: of all tensors: their names, and what makes them from memory that nobody changes meanwhile.
        """
        made = self._without_tensors()
        made.__dict__.update(_own(own))
        made._unmade = _Unmade(parts, len(self.layers))
        return made

    def _without_tensors(self) -> Self:
        """A cache that has all of this one but tensors, to which the caller gives some."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.pop("layers", None)
        made._unmade, made._capacity, made._written = None, 0, 0
        return made

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all stored tensors with their names in files, such as `lengths` and `layers.3.packed.key_0`.

        They may be views of larger buffers. Appends do not change a row's tokens in them, unless the row was cropped.
        """
        for name in OWN_TENSORS:
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor
        yield from layer_tensors(self.layers)

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces all tensors by those named, at once: what interrupts it leaves one or the other."""
        layers = [TurboCacheLayer() for _ in self.layers]
        _put(layers, tensors.items())
        self.__dict__.update(_own(tensors), layers=layers, _seq_length=None)

    def described(self, name: str, tensors: list[Tensor], make: Callable[[], tuple[_Made, bool]]) -> _Made:
        """A description of where the tensors of this cache lie, made once while they stay the same.

        Args:
            name: of the description.
            tensors: those that it describes.
            make: makes it, and says whether it describes copies, which would not follow changes in place.
        """
        known: tuple[list[Tensor], _Made] | None = self.descriptions.get(name)
        if known is not None and len(known[0]) == len(tensors) and all(map(operator.is_, known[0], tensors)):
            return known[1]
        made, copied = make()
        if not copied:
            self.descriptions[name] = (tensors, made)
        return made

    def _map_tensors(self, function: Callable[[Tensor, int], Tensor], axis: Axis | None = None) -> None:
        """Replaces every tensor, or those of one axis, by `function` of it and of the dimension of its axis."""
        if axis in (None, Axis.COLUMN):
            self._capacity = 0
        self._set_tensors(
            {
                name: function(tensor, dim_of(name)) if axis in (None, axis_of(name)) else tensor
                for name, tensor in self.named_tensors()
            }
        )

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def _on_cpu(self) -> bool:
        """True if values can be read without a device sync."""
        return self.device.type == "cpu"

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    def columns(self) -> int:
        return self.token_ids.shape[1]

    def _write(self, new: Mapping[str, Tensor], counts: Tensor) -> None:
        """Writes an append's tensors [batch, ..., n, ...] after each row's own; `counts` tokens of each are kept."""
        if self.columns:
            steps = torch.arange(new["token_ids"].shape[1], device=self.device)
            self._make_room(self.columns + len(steps))
            columns = self.lengths[:, None] + steps
            new = {
                name: self._appended(name, old, new[name], columns) for name, old in self.named_tensors() if name in new
            }
        else:
            self._capacity = 0
        self._set_tensors({**new, "lengths": self.lengths + counts})
        self._written = max(self._written, self.columns)

    def _appended(self, name: str, old: Tensor, new: Tensor, columns: Tensor) -> Tensor:
        """A stored tensor with that of an append after it, whose tokens go to these columns, [batch, n]."""
        axis, dim = axis_of(name), dim_of(name)
        if axis is Axis.ROW:
            return new
        # Exact keys and values stay in the dtype in which the first were stored.
        new = new.to(old.dtype)
        if axis is Axis.SLOT:
            return torch.cat([old, new], dim=dim)
        before, after = self.columns, self.columns + new.shape[dim]
        appended = into_room(old, dim, after)
        if before < self._written:
            # Cropped tokens were here. Beyond a row's length, files hold zeros in new columns.
            appended.narrow(dim, before, min(self._written, after) - before).zero_()
        index = columns.to(new.device).view(len(new), *[1] * (dim - 1), -1, *[1] * (new.dim() - dim - 1))
        return appended.scatter_(dim, index.expand_as(new), new)

    # These tensors are written into later, in any mode, which inference tensors do not allow.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _make_room(self, columns: int) -> None:
        """Allocates columns unless `columns` can be written in place."""
        if columns > self._capacity:
            # A quarter more: appending token by token then copies each token about four times.
            capacity = -(-(columns + columns // 4) // _CAPACITY_STEP) * _CAPACITY_STEP
            self._replace_columns(lambda tensor, dim: with_room(tensor, dim, capacity))
            self._capacity, self._written = capacity, self.columns

    def _trim(self, columns: int) -> None:
        """Keeps the first columns, in place unless more than half of those allocated would be spare."""
        if columns < self.columns:
            capacity = self._capacity if 2 * columns >= self._capacity else 0

            if capacity:
                self._map_tensors(lambda tensor, dim: tensor.narrow(dim, 0, columns), Axis.COLUMN)
            else:
                self._replace_columns(lambda tensor, dim: tensor.narrow(dim, 0, columns).contiguous())
            self._capacity = capacity

    def _replace_columns(self, function: Callable[[Tensor, int], Tensor]) -> None:
        """Replaces all that is stored per column by copies, and frees what was there."""
        before = [tensor for name, tensor in self.named_tensors() if axis_of(name) is Axis.COLUMN]
        self._map_tensors(function, Axis.COLUMN)
        self._let_go(before)

    def _let_go(self, dropped: Iterable[Tensor]) -> None:
        """Copies tensors that share a buffer with dropped ones (`TurboKVCache.cut`): they would keep all of it."""
        buffers = {tensor.untyped_storage().data_ptr() for tensor in dropped if tensor.numel()}
        held = {
            name: tensor.clone()
            for name, tensor in self.named_tensors()
            if tensor.numel() and tensor.untyped_storage().data_ptr() in buffers
        }
        if held:
            if any(axis_of(name) is Axis.COLUMN for name in held):
                self._capacity = 0
            self._set_tensors(dict(self.named_tensors()) | held)


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Attributes of a cache for those tensors that no layer has."""
    # A description refers to tensors, and would keep those that are replaced.
    own = {name: tensors[name] for name in ("lengths", "token_ids", "protected_columns")}
    return own | {"descriptions": {}, "positions": tensors.get("positions"), "chains": tensors.get("chains")}


def _put(layers: Sequence[TurboCacheLayer], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Puts named tensors into the layers that have them."""
    for name, tensor in tensors:
        if name not in OWN_TENSORS:
            index, group, own_name = layer_tensor(name)
            getattr(layers[index], group)[own_name] = tensor
