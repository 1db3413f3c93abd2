"""The interface of a codec, and the per-head rotation, or other linear map, of keys and values that every codec shares.

A codec works in two steps. `transform` maps keys and values into the space in which they are stored,

    k' = T_k (k - mu_k),    v' = T_v (v - mu_v),

and `quantize` turns k' and v' into packed tensors. Attention over a cache never maps a stored key or
value back: the query is mapped once and the output once (docs/math.md; the maps are fitted in `fitting.transforms`),

    q . k = (T_k^-T q) . k' + q . mu_k,    sum_j p_j v_j = T_v^-1 (sum_j p_j v'_j) + mu_v.

A codec may store keys relative to their block of columns. With R(p) the rotation of RoPE and b the first column of the
block, k above is then R(-b) k and q is R(-b) q, one mapped query per block. The statistics of such keys do not depend
on their position in the protein, and scores are unchanged because R is orthogonal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.codecs.row_index import RowIndex
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.fingerprint import codec_fingerprint

Packed = dict[str, Tensor]
"""Stored tensors of one layer, [batch, heads, tokens, ...], with the same number of bytes for every token."""


@dataclass(frozen=True)
class PackedContext:
    """One layer of a cache, as an extension reads it.

    Shapes: C cached rows (the batch, 1 shared by all, or any number with an `index`), B batch of the extension, H
    heads, L columns, P slots.

    Attributes:
        packed: tensors of the codec, [C, H, L, ...].
        mask: packed columns that each row of the extension reads, bool [B, L]; None for all. Protected columns and
            those beyond `lengths` are excluded.
        protected: transformed keys and values of protected tokens, [C, H, P, D]; empty for none.
        protected_mask: slots that each row reads, bool [B, P].
        rows: tensors that the codec stores once per row, [C, H, 1, ...]; empty for none.
        lengths: tokens of every cached row, [C]; None where `mask` alone defines the contents.
        protected_columns: columns of the slots, int32 [C, P], -1 for an empty slot.
        visible: columns that each row may see at all, bool [B, L]; None for all. `lengths`, `protected_columns` and
            `visible` together determine `mask`.
        visible_words: the same as `visible` in the form that a backend reads, where a caller has made it for all layers
            (`KVBackend.pack_mask`).
        index: cached row that each row reads; None if they are the same, or one that all share.
        common: what a backend remembers for the other layers of a forward, whose contexts differ in nothing but
            `packed`, `protected` and `rows`; None for a context by itself.
    """

    packed: Packed
    mask: Tensor | None
    protected: Packed
    protected_mask: Tensor | None
    rows: Packed = field(default_factory=dict)
    lengths: Tensor | None = None
    protected_columns: Tensor | None = None
    visible: Tensor | None = None
    visible_words: Tensor | None = None
    index: RowIndex | None = None
    common: dict[Any, Any] | None = None

    def of(self, contexts: Tensor) -> PackedContext:
        """Some cached rows, integers [n], without what says how rows of the extension read them."""

        def take(tensors: Packed) -> Packed:
            return {name: tensor[contexts] for name, tensor in tensors.items()}

        columns = self.protected_columns
        return PackedContext(
            take(self.packed),
            None,
            take(self.protected),
            None,
            take(self.rows),
            None if self.lengths is None else self.lengths[contexts],
            None if columns is None else columns[contexts],
        )


@dataclass(frozen=True)
class FieldSlab:
    """A packed tensor of bit fields that a kernel can decode on its own.

    A component is a sum over slabs: the field's weight times the difference of field and midpoint of the field's range,
    or times the field's entry in a table.

    Attributes:
        name: name of the packed tensor, in the format of `packing`.
        bits: bits per field.
        components: component that each field belongs to.
        weights: weight of each field.
        table: name of a look-up table [heads, 2^bits] in the codec's state; None for fields without one.
    """

    name: str
    bits: int
    components: tuple[int, ...]
    weights: tuple[float, ...]
    table: str | None = None


class KVCodec(ABC):
    """Storage format of keys and values, fitted to one model.

    Shapes below: B batch, H heads, L tokens, D `head_dim`. Inputs may have any floating dtype; the maps and
    `unpack` return float32.

    Args:
        config: the options.
        geometry: geometry of the model.
        state: result of `fit`: float32 tensors stacked over layers. The maps are named `key_map`, `key_inverse`,
            `value_map`, `value_inverse` [layers, H, D, D] and `key_mean`, `value_mean` [layers, H, D]; an absent one is
            the identity, or zero. A codec with blocks also has `inv_freq` [layers, D / 2], the model's rotary
            frequencies.

    Attributes:
        block_size: columns per block for block-relative keys; None for keys that are stored as they are.
        layers_alike: whether all layers store tensors of the same names.
        rows_alike: whether all contexts store as much per row, whatever their lengths.
        hides_nan: whether keys and values that are not finite do not show when a context is read.
        hides_appended_nan: the same of tokens that are appended to others.
    """

    block_size: int | None = None
    layers_alike: bool = True
    rows_alike: bool = True
    hides_nan: bool = False
    hides_appended_nan: bool = False

    def __init__(self, config: TurboConfig, geometry: Geometry, state: Mapping[str, Tensor]) -> None:
        self.config = config
        self.geometry = geometry
        self.state = dict(state)
        self._on_device: dict[tuple[int, torch.device], dict[str, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what was made on devices, which another process has under other numbers, or not at all."""
        return self.__dict__ | {"_on_device": {}}

    @cached_property
    def fingerprint(self) -> npt.NDArray[np.float32]:
        """Fingerprint by which a cache recognises the codec that wrote it."""
        return codec_fingerprint(self.state)

    @classmethod
    @abstractmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """Fit the state of a codec to these statistics."""

    @classmethod
    def fit_all(cls, configs: Sequence[TurboConfig], statistics: KVStatistics) -> list[dict[str, Tensor]]:
        """Fit the states of several presets, which may share work."""
        return [cls.fit(config, statistics) for config in configs]

    @abstractmethod
    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        """Quantise and pack transformed keys (`kind` "key") or values ("value"), [B, H, L, D]."""

    @abstractmethod
    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        """Transformed keys or values [B, H, L, D] from all tensors of a layer, those of `summarize` included."""

    def quantize(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        """Quantise and pack transformed keys and values."""
        return self.pack(layer_idx, "key", keys) | self.pack(layer_idx, "value", values)

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        """Compute the tensors stored once per row for a context that was just quantised, [B, H, 1, ...].

        Args:
            layer_idx: index of the layer.
            keys: transformed keys, [B, H, L, D].
            values: transformed values, [B, H, L, D].
            packed: result of `quantize` for them.
            mask: tokens that are read from `packed`, bool [B, L].
        """
        return {}

    def field_slabs(self, layer_idx: int, kind: str) -> list[FieldSlab]:
        """Packed tensors of a layer's keys (`kind` "key") or values ("value"), for kernels; empty if unsupported."""
        return []

    def refinements(self, layer_idx: int) -> list[str]:
        """Names of packed tensors that can be dropped: the context stays readable, at lower accuracy."""
        return []

    def transform(
        self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map keys and values into the space in which they are stored.

        Args:
            layer_idx: index of the layer.
            keys: keys after RoPE, [B, H, L, D].
            values: values of the same tokens, [B, H, L, D].
            columns: column of each token in the cache, [B, L]; None for 0, 1, 2, ...
        """
        state = self.layer_state(layer_idx, keys.device)
        keys = self._rotate_to_blocks(state, keys.float(), columns, -1)
        return (
            _apply(state.get("key_map"), _shift(keys, state.get("key_mean"), -1)),
            _apply(state.get("value_map"), _shift(values, state.get("value_mean"), -1)),
        )

    def map_query(
        self, layer_idx: int, query: Tensor, first_block: int = 0, num_blocks: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Map a query for the stored keys of every block, T_k^-T q, with its score offset q . mu_k.

        Args:
            layer_idx: index of the layer.
            query: query after RoPE, [B, H, n, D].
            first_block: first block to be read; 0 for a codec without blocks.
            num_blocks: number of blocks to be read; 1 for a codec without blocks.

        Returns:
            Mapped queries [B, H, num_blocks, n, D], and offsets [B, H, num_blocks, n, 1] or None for zero.
        """
        state = self.layer_state(layer_idx, query.device)
        query = query.float()[:, :, None]
        if self.block_size is not None and (first_block or num_blocks > 1):
            blocks = torch.arange(first_block, first_block + num_blocks, device=query.device)
            query = rotate(query, blocks[:, None, None] * (state["inv_freq"] * -self.block_size))
        shape = query.shape[2:4]
        # One product per head for all blocks.
        query = query.flatten(2, 3)
        mean, inverse = state.get("key_mean"), state.get("key_inverse")
        offset = None if mean is None else (query @ mean[:, :, None]).unflatten(2, shape)
        return (query if inverse is None else query @ inverse).unflatten(2, shape), offset

    def unmap_output(self, layer_idx: int, output: Tensor) -> Tensor:
        """Map a weighted mean of stored values [B, H, n, D] back: T_v^-1 v' + mu_v."""
        state = self.layer_state(layer_idx, output.device)
        return _shift(_apply(state.get("value_inverse"), output), state.get("value_mean"), 1)

    def encode(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        """`transform`, then `quantize`, at columns 0, 1, 2, ..."""
        return self.quantize(layer_idx, *self.transform(layer_idx, keys, values))

    def decode(self, layer_idx: int, packed: Packed) -> tuple[Tensor, Tensor]:
        """Unpack and map back: keys and values [B, H, L, D] at columns 0, 1, 2, ... (slow reference)."""
        keys, values = (self.unpack(layer_idx, kind, packed) for kind in ("key", "value"))
        return self.inverse_transform(layer_idx, keys, values)

    def inverse_transform(
        self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Undo `transform`."""
        state = self.layer_state(layer_idx, keys.device)
        keys = _shift(_apply(state.get("key_inverse"), keys), state.get("key_mean"), 1)
        return self._rotate_to_blocks(state, keys, columns, 1), self.unmap_output(layer_idx, values)

    def _rotate_to_blocks(self, state: dict[str, Tensor], keys: Tensor, columns: Tensor | None, sign: int) -> Tensor:
        """Rotate every key by `sign` times its block's first column: -1 to the block's coordinates, 1 back."""
        if self.block_size is None:
            return keys
        if columns is None:
            columns = torch.arange(keys.shape[2], device=keys.device)[None]
        start = sign * (columns // self.block_size * self.block_size)
        return rotate(keys, start[:, None, :, None] * state["inv_freq"])

    def layer_state(self, layer_idx: int, device: torch.device) -> dict[str, Tensor]:
        """State of one layer on a device, prepared once."""
        key = (layer_idx, device)
        if key not in self._on_device:
            tensors = {name: stack[layer_idx].to(device) for name, stack in self.state.items()}
            with torch.autocast(device.type, enabled=False):
                prepared = self.prepare(tensors)
            publish(device)
            self._on_device[key] = prepared
        return self._on_device[key]

    def prepare(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add derived tensors, such as decoding tables, to one layer's state."""
        return tensors


def publish(device: torch.device) -> None:
    """Complete all writes so far, before what is kept for all calls is read on other streams, in other threads."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def _apply(matrix: Tensor | None, x: Tensor) -> Tensor:
    """Apply matrix [H, D, D] to every vector of x [B, H, L, D]."""
    x = x.float()
    return x if matrix is None else x @ matrix.transpose(-1, -2)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate x [..., D] by angles broadcastable to [..., D / 2], as RoPE does; pairs are (i, i + D / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _shift(x: Tensor, mean: Tensor | None, sign: int) -> Tensor:
    """Add `sign` times mean [H, D] to x [B, H, L, D]."""
    x = x.float()
    return x if mean is None else x + sign * mean[:, None, :]
