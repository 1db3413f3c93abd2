"""The interface of a codec, and the linear maps that every codec shares.

A codec works in two steps. `transform` maps keys and values into the space in which they are stored,

    k' = T_k (k - mu_k),    v' = T_v (v - mu_v),

and `quantize` turns k' and v' into packed tensors. Attention over a cache never maps a stored key or
value back: the query is mapped once and the result once (docs/math.md),

    q . k = (T_k^-T q) . k' + q . mu_k,    sum_j p_j v_j = T_v^-1 (sum_j p_j v'_j) + mu_v.

A codec may store keys relative to the block of columns that they stand in: with R(p) the rotation of RoPE, k above is
then R(-b) k, b the block's first column, and q is R(-b) q, one mapped query a block. The statistics of such keys do not
depend on where in a protein they stand, and scores are what they were, since R is orthogonal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.fingerprint import codec_fingerprint

Packed = dict[str, Tensor]
"""What one layer stores: tensors [batch, heads, tokens, ...], the same bytes for every token."""


@dataclass(frozen=True)
class PackedContext:
    """What one layer of a cache shows to an extension.

    Shapes: C cached rows (the batch, or 1 shared by all), B batch of the extension, H heads, L columns, P slots.

    Attributes:
        packed: what the codec stores, tensors [C, H, L, ...].
        mask: which columns a row of the extension sees, bool [B, L]; None where it sees all.
        protected: transformed keys and values of protected tokens, [C, H, P, D]; empty for none.
        protected_mask: which slots a row sees, bool [B, P].
        rows: what the codec stores once a row, tensors [C, H, 1, ...]; empty for nothing.
        lengths: tokens of every cached row, [C]; None where `mask` alone says what is there.
        protected_columns: of the slots, int32 [C, P], -1 for none. They and what is beyond `lengths` are not in `mask`.
        visible: which columns a row may see at all, bool [B, L]; None for all. With `lengths` it makes `mask`.
    """

    packed: Packed
    mask: Tensor | None
    protected: Packed
    protected_mask: Tensor | None
    rows: Packed = field(default_factory=dict)
    lengths: Tensor | None = None
    protected_columns: Tensor | None = None
    visible: Tensor | None = None


@dataclass(frozen=True)
class FieldSlab:
    """A packed tensor whose fields a kernel can read on its own.

    A component is the sum over slabs of its weight times its field less the middle of the field's range, or times what
    a table holds for the field.

    Attributes:
        name: of the packed tensor; fields lie in it as `packing` says.
        bits: of a field.
        components: which component each field belongs to.
        weights: of each field.
        table: the name in the codec's state of a table [heads, 2^bits], if fields are looked up.
    """

    name: str
    bits: int
    components: tuple[int, ...]
    weights: tuple[float, ...]
    table: str | None = None


class KVCodec(ABC):
    """A way of storing keys and values, fitted to one model.

    Shapes below: B batch, H heads, L tokens, D `head_dim`. Inputs may have any floating dtype; what comes
    out of the maps and of `dequantize_*` is float32.

    Args:
        config: the options.
        geometry: of the model.
        state: what `fit` returned: float32 tensors stacked over layers. The maps have the names
            `key_map`, `key_inverse`, `value_map`, `value_inverse` [layers, H, D, D] and
            `key_mean`, `value_mean` [layers, H, D]; one that is absent is the identity, or zero. A codec with blocks
            also has `inv_freq` [layers, D / 2], the model's rotary frequencies.

    Attributes:
        block_size: columns of a block that keys are relative to; None for keys as they are.
        layers_alike: whether all layers store tensors of the same names.
    """

    block_size: int | None = None
    layers_alike: bool = True

    def __init__(self, config: TurboConfig, geometry: Geometry, state: Mapping[str, Tensor]) -> None:
        self.config = config
        self.geometry = geometry
        self.state = dict(state)
        self._on_device: dict[tuple[int, torch.device], dict[str, Tensor]] = {}

    @cached_property
    def fingerprint(self) -> npt.NDArray[np.float32]:
        """What a cache remembers of the codec that wrote it."""
        return codec_fingerprint(self.state)

    @classmethod
    @abstractmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """The state of a codec for these statistics."""

    @abstractmethod
    def quantize(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        """Packs transformed keys and values [B, H, L, D]."""

    @abstractmethod
    def dequantize_keys(self, layer_idx: int, packed: Packed) -> Tensor:
        """Transformed keys as stored, [B, H, L, D]. `packed` holds the tensors of `summarize` too."""

    @abstractmethod
    def dequantize_values(self, layer_idx: int, packed: Packed) -> Tensor:
        """Transformed values as stored, [B, H, L, D]."""

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        """What is stored once a row for a context that has just been quantised, tensors [B, H, 1, ...].

        Args:
            layer_idx: which layer.
            keys: transformed, [B, H, L, D].
            values: transformed, [B, H, L, D].
            packed: what `quantize` made of them.
            mask: which of them are read from `packed`, bool [B, L].
        """
        return {}

    def field_slabs(self, layer_idx: int, kind: str) -> list[FieldSlab]:
        """The packed tensors of a layer's keys (`kind` "key") or values ("value"), for kernels; empty if none can."""
        return []

    def refinements(self, layer_idx: int) -> list[str]:
        """Names of packed tensors without which a context can still be read, less exactly."""
        return []

    def transform(
        self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Maps keys (after RoPE) and values [B, H, L, D] into the space in which they are stored.

        Args:
            layer_idx: which layer.
            keys: after RoPE.
            values: of the same tokens.
            columns: where each token will stand, [B, L]; None for 0, 1, 2, ...
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
        """The query against stored keys of every block, T_k^-T q, and what it adds to every score, q . mu_k.

        Args:
            layer_idx: which layer.
            query: after RoPE, [B, H, n, D].
            first_block: of the columns that are to be read; 0 for a codec that has no blocks.
            num_blocks: how many; 1 for a codec that has no blocks.

        Returns:
            [B, H, num_blocks, n, D], and [B, H, num_blocks, n, 1] or None for zero.
        """
        state = self.layer_state(layer_idx, query.device)
        query = query.float()[:, :, None]
        if self.block_size is not None and (first_block or num_blocks > 1):
            blocks = torch.arange(first_block, first_block + num_blocks, device=query.device)
            query = rotate(query, blocks[:, None, None] * (state["inv_freq"] * -self.block_size))
        shape = query.shape[2:4]
        # All blocks in one product a head.
        query = query.flatten(2, 3)
        mean, inverse = state.get("key_mean"), state.get("key_inverse")
        offset = None if mean is None else (query @ mean[:, :, None]).unflatten(2, shape)
        return (query if inverse is None else query @ inverse).unflatten(2, shape), offset

    def unmap_output(self, layer_idx: int, output: Tensor) -> Tensor:
        """Maps a weighted mean of stored values [B, H, n, D] back: T_v^-1 v' + mu_v."""
        state = self.layer_state(layer_idx, output.device)
        return _shift(_apply(state.get("value_inverse"), output), state.get("value_mean"), 1)

    def encode(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        """`transform`, then `quantize`."""
        return self.quantize(layer_idx, *self.transform(layer_idx, keys, values))

    def decode(self, layer_idx: int, packed: Packed) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, L, D] as a reader who maps everything back sees them (the slow way)."""
        keys, values = self.dequantize_keys(layer_idx, packed), self.dequantize_values(layer_idx, packed)
        return self.inverse_transform(layer_idx, keys, values)

    def inverse_transform(
        self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inverse of `transform`."""
        state = self.layer_state(layer_idx, keys.device)
        keys = _shift(_apply(state.get("key_inverse"), keys), state.get("key_mean"), 1)
        return self._rotate_to_blocks(state, keys, columns, 1), self.unmap_output(layer_idx, values)

    def _rotate_to_blocks(self, state: dict[str, Tensor], keys: Tensor, columns: Tensor | None, sign: int) -> Tensor:
        """Rotates every key back (sign -1) by its block's first column, or forth (sign 1)."""
        if self.block_size is None:
            return keys
        if columns is None:
            columns = torch.arange(keys.shape[2], device=keys.device)[None]
        start = sign * (columns // self.block_size * self.block_size)
        return rotate(keys, start[:, None, :, None] * state["inv_freq"])

    def layer_state(self, layer_idx: int, device: torch.device) -> dict[str, Tensor]:
        """The state of one layer on a device; made once."""
        key = (layer_idx, device)
        if key not in self._on_device:
            tensors = {name: stack[layer_idx].to(device) for name, stack in self.state.items()}
            self._on_device[key] = self.prepare(tensors)
        return self._on_device[key]

    def prepare(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds to one layer's state what decoding wants at hand, such as tables."""
        return tensors


def _apply(matrix: Tensor | None, x: Tensor) -> Tensor:
    """matrix [H, D, D] times every vector of x [B, H, L, D]."""
    x = x.float()
    return x if matrix is None else x @ matrix.transpose(-1, -2)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """RoPE of x [..., D] by angles broadcastable to [..., D / 2]; pairs are (i, i + D / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _shift(x: Tensor, mean: Tensor | None, sign: int) -> Tensor:
    """x [B, H, L, D] plus or minus mean [H, D]."""
    x = x.float()
    return x if mean is None else x + sign * mean[:, None, :]
