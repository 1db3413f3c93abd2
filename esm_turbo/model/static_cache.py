"""Caches in tensors with fixed addresses and sizes, which captured graphs read."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from esm_turbo.kv.append import Append
from esm_turbo.kv.tensors import LAYER_TENSORS, OWN_TENSORS, Axis, axis_of, dim_of
from esm_turbo.kv_cache import PROTECTED_SLOTS, TurboKVCache
from esm_turbo.ops.copies import ByteRows, copy_rows


class StaticKVCache(TurboKVCache):
    """A cache in tensors with fixed addresses and fixed numbers of rows and columns, for graphs to read.

    Other contexts can be loaded into it (`copy_`); nothing can be appended to it. Masks over the past have all columns,
    whatever the lengths of the contexts.
    """

    # These tensors are written into later, in any mode, which inference tensors do not allow.
    @classmethod
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def like(cls, cache: TurboKVCache, columns: int | None = None, rows: int | None = None) -> Self:
        """Allocates a static cache for contexts like those of a cache, and copies these into it.

        Args:
            cache: claimed by a model, with at least one row.
            columns: length of the longest context to come; None for the columns of `cache`.
            rows: most contexts to come; None for the rows of `cache`.

        Raises:
            ValueError: the cache is empty or unclaimed, or has more columns.
        """
        if cache.codec is None or not cache.batch_size:
            raise ValueError("a static cache needs a context: the cache is empty, or no model has claimed it")
        columns = cache.columns if columns is None else columns
        if columns < cache.columns:
            raise ValueError(f"`columns` must be at least the context's {cache.columns}, got {columns}")
        sizes = {Axis.COLUMN: columns, Axis.SLOT: PROTECTED_SLOTS if cache.config.protect_special_tokens else 0}
        rows = cache.batch_size if rows is None else rows
        tensors = {
            name: _zeros(name, tensor, rows, sizes) for name, tensor in cache.named_tensors() if name != "chains"
        }
        made = cls.from_tensors(cache.config, cache.geometry, cache.identity, cache.codec, tensors)
        made.copy_(cache)
        return made

    def copy_(self, cache: TurboKVCache) -> None:
        """Loads other contexts of the same model and options. Rows beyond theirs become empty.

        Raises:
            ValueError: they are of another model or stored otherwise, too many or too long.
        """
        same = cache.codec is self.codec and cache.config == self.config
        if not same or cache.identity.difference(self.identity):
            raise ValueError("the contexts must be of the same model, options and calibration")
        if cache.batch_size > self.batch_size or cache.columns > self.columns:
            raise ValueError(
                f"there is room for {self.batch_size} rows of up to {self.columns} columns, got {cache.batch_size} of"
                f" {cache.columns}"
            )
        slots = cache.protected_columns.shape[1]
        if (cache.positions is None) != (self.positions is None) or slots > self.protected_columns.shape[1]:
            raise ValueError("all contexts or none must store positions, and each may protect two tokens at most")
        names, rows = layer_rows(cache)
        if names != layer_rows(self)[0]:
            raise ValueError("refinements were dropped (drop_refinements) from some of the contexts only")
        # All checks are done: a refused cache must change nothing.
        self.load_(cache, rows)

    def load_(self, cache: TurboKVCache, rows: ByteRows) -> None:
        """Loads contexts that are known to fit; `rows` are those of their layers."""
        # The model may have noticed changes of its weights since.
        self.identity = cache.identity
        self.lengths.zero_()
        self.protected_columns.fill_(-1)
        for name in OWN_TENSORS:
            given = getattr(cache, name)
            # Which chains a token sees is in the masks.
            if given is not None and name != "chains":
                getattr(self, name)[tuple(map(slice, given.shape))] = given
        copy_rows(rows, layer_rows(self)[1])

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Number of columns. Lengths are known to the device only."""
        return self.columns

    def plan_append(self, *args: Any, **kwargs: Any) -> Append:
        raise ValueError("nothing can be appended to a static cache")

    def _changed(self, at_most: int | None = None, slots: int | None = None) -> None:
        """Keeps all columns and slots."""


def layer_rows(cache: TurboKVCache) -> tuple[tuple[str, ...], ByteRows]:
    """Names, with dtypes, and rows of the tensors of a cache's layers; described once while they stay the same."""
    tensors = [x for layer in cache.layers for group in LAYER_TENSORS for x in getattr(layer, group).values()]

    def make() -> tuple[tuple[tuple[str, ...], ByteRows], bool]:
        named = [(name, tensor) for name, tensor in cache.named_tensors() if name not in OWN_TENSORS]
        rows = ByteRows(tensors, [dim_of(name) for name, _ in named])
        return (tuple(f"{name} {tensor.dtype}" for name, tensor in named), rows), rows.copied

    return cache.described("rows", tensors, make)


def _zeros(name: str, tensor: Tensor, rows: int, sizes: dict[Axis, int]) -> Tensor:
    """Zeros in the shape of a cache's tensor, with other numbers of rows, columns and slots."""
    shape = [rows, *tensor.shape[1:]]
    if (axis := axis_of(name)) in sizes:
        shape[dim_of(name)] = sizes[axis]
    return tensor.new_zeros(shape)
