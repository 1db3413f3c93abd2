"""The layout of a codec's fields in the operands of the Triton kernels, and the matching maps. Triton is not needed.

A kernel reads a slab as [tokens, elements] of 8, 16 or 32 bits, and unpacks it in the order in which lanes of a tensor
core's operand hold it. That order is defined here once, as the component at each index of an operand, and the maps of
the query and of the output are permuted into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esm_turbo.codecs import FieldSlab, KVCodec, Packed
from esm_turbo.codecs.base import publish
from esm_turbo.config import Geometry
from esm_turbo.ops.slabs import SlabSpec
from esm_turbo.ops.triton_launch import per_codec

_MIN_OPERAND_SIZE = 16
# A tensor core's operand distributes the components of a key over four lanes, those of a value over eight.
_KEY_LANES, _VALUE_LANES = 4, 8
# Smaller maps count as zero: keys that vary less are all equal, and their mean cannot be divided by less.
_MIN_SCALE = 1e-20
_SLOTS = 2
# Blocks that a program may process beyond the last one.
_EXTRA_BLOCKS = 16
_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class SlabView:
    """A slab as a kernel reads it."""

    name: str
    spec: SlabSpec

    def of(self, packed: Packed) -> Tensor:
        """The slab's tensor as words, [..., words]."""
        slab = packed[self.name]
        if slab.stride()[-2:] != (slab.shape[-1], 1):
            slab = slab.contiguous()
        return slab.view(_WORD_DTYPES[slab.shape[-1] // self.spec.stored])


def key_view(slab: FieldSlab) -> SlabView:
    """The view that the kernels have of a slab of keys."""
    return _view(slab, _KEY_LANES)


def value_view(slab: FieldSlab) -> SlabView:
    """The view that the kernels have of a slab of values."""
    return _view(slab, _VALUE_LANES)


def _view(slab: FieldSlab, lanes: int) -> SlabView:
    stored = max(1, len(slab.components) * slab.bits // 32)
    words, components = next_power_of_two(stored), next_power_of_two(len(slab.components))
    elements = max(words, min(lanes, components))
    spec = SlabSpec(
        bits=slab.bits,
        words=words,
        elements=elements,
        element_bits=components * slab.bits // elements,
        size=max(_MIN_OPERAND_SIZE, components),
        table=slab.table is not None,
        stored=stored,
    )
    return SlabView(slab.name, spec)


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def num_slots(slots: int) -> int:
    """Slots of protected tokens that a kernel has room for: a protein has two special tokens, few contexts more."""
    return max(_SLOTS, next_power_of_two(max(1, slots)))


def key_order(spec: SlabSpec) -> list[int]:
    """The slab's component at each index of a key operand; -1, or beyond the end of the list, for none.

    A lane holds four consecutive indices: two fields from each half of its element.
    """
    half, pairs, per_lane = spec.fields // 2, min(2, spec.fields // 2), spec.elements // _KEY_LANES
    order = []
    for high in range(half // pairs):
        for index in range(spec.elements):
            element = index % _KEY_LANES * per_lane + index // _KEY_LANES
            for pair in range(2):
                for upper in range(2):
                    empty = pair >= pairs
                    if not empty or spec.size > 2 * spec.elements:
                        order.append(-1 if empty else element * spec.fields + high * pairs + pair + upper * half)
    return order


def quads_to_pairs(count: int) -> list[int]:
    """The index of a key operand that each column of the product of mapped queries is computed for.

    A lane multiplies four consecutive indices of 16, but a product leaves it a pair of columns from each 8. The kernels
    undo this permutation (`products.pairs_to_quads`).
    """
    return [c // 16 * 16 + c % 8 // 2 * 4 + c // 8 % 2 * 2 + c % 2 for c in range(count)]


def value_order(spec: SlabSpec) -> list[int]:
    """The slab's component at each index of a value operand, or beyond it; without padding."""
    return [element * spec.fields + field for field in range(spec.fields) for element in range(spec.elements)]


def field_scale(spec: SlabSpec, index: int) -> float:
    """The factor by which a field of an operand is too large: kernels do not shift it within its byte."""
    return 1.0 if spec.table else 2.0 ** (index * spec.bits % 8)


@dataclass(frozen=True)
class KernelLayout:
    """One layer of a codec as `attend_context` and `merge` need it. P and V: sizes of all key and value operands.

    Operands miss the middle of the fields' ranges by a constant, which is made good after the products.

    Attributes:
        keys: views of the key slabs.
        values: views of the value slabs.
        query_map: the query's map to every index of the key operands, in the order of `quads_to_pairs`; the halves of
            the head apart and padded with zeros, divided by `map_scale`: float32 [heads, 2, P, half].
        map_scale: the largest entry of each head's map, float32 [heads].
        field_bias: minus the middle of each field's range, as counted in the key operands, in the order of `query_map`;
            float16 [P].
        value_map: from every index of the value operands to the output, float32 [heads, V, head_dim].
        value_scale: by which each head's `value_map` is multiplied, float32 [heads].
        value_middle: the middle of each field's range in the value operands, float32 [V].
        means: of keys and of values, float32 [2, heads, head_dim].
        inverses: the codec's maps from the stored space, of keys and of values, float32 [2, heads, head_dim, head_dim].
        key_table: float32 [heads, 16], or None.
        value_table: float32 [heads, 16], or None.
    """

    keys: tuple[SlabView, ...]
    values: tuple[SlabView, ...]
    query_map: Tensor
    map_scale: Tensor
    field_bias: Tensor
    value_map: Tensor
    value_scale: Tensor
    value_middle: Tensor
    means: Tensor
    inverses: Tensor
    key_table: Tensor | None
    value_table: Tensor | None

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors but the tables."""
        return [
            self.query_map,
            self.map_scale,
            self.field_bias,
            self.value_map,
            self.value_scale,
            self.value_middle,
            self.means,
            self.inverses,
        ]

    @functools.cached_property
    def tables(self) -> list[Tensor]:
        """Those of keys and of values, or none."""
        return [table for table in (self.key_table, self.value_table) if table is not None]

    @functools.cached_property
    def specs(self) -> tuple[list[int], list[int]]:
        """The specs of all key slabs, one after the other, and those of all value slabs."""
        keys, values = ([number for view in views for number in view.spec] for views in (self.keys, self.values))
        return keys, values

    @functools.cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of the packed tensors of keys, and of values."""
        return [view.name for view in self.keys], [view.name for view in self.values]

    @functools.cached_property
    def kind(self) -> object:
        """The same object for layouts of the same kernels."""
        keys, values = self.specs
        return _kind(*keys, None, *values, self.query_map.shape, self.value_map.shape, len(self.tables))


@functools.cache
def _kind(*described: Any) -> object:
    return object()


def neutral_maps(geometry: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands for a map and for a mean that a codec does not have: float32 [H, D, D] and [H, D]."""
    heads, head_dim = geometry.num_heads, geometry.head_dim
    identity = torch.eye(head_dim, dtype=torch.float32, device=device).expand(heads, -1, -1)
    return identity, torch.zeros(heads, head_dim, dtype=torch.float32, device=device)


def triton_layout(
    codec: KVCodec, layer_idx: int, stored: Sequence[str], device: torch.device, half: bool
) -> KernelLayout:
    """The layout of one layer.

    Args:
        codec: one with `field_slabs`.
        layer_idx: which layer.
        stored: names of the packed tensors that the context has.
        device: of the maps.
        half: whether operands are in half precision; otherwise in float32.
    """
    geometry, state = codec.geometry, codec.layer_state(layer_idx, device)
    heads, head_dim = geometry.num_heads, geometry.head_dim
    identity, zero = neutral_maps(geometry, device)
    key_inverse = state.get("key_inverse", identity)
    value_inverse = state.get("value_inverse", identity)
    key_slabs, value_slabs = (
        [slab for slab in codec.field_slabs(layer_idx, kind) if slab.name in stored] for kind in ("key", "value")
    )
    keys, values = tuple(map(key_view, key_slabs)), tuple(map(value_view, value_slabs))
    key_operands = [_Operand.of(slab, key_view(slab).spec, key_order, half) for slab in key_slabs]
    value_operands = [_Operand.of(slab, value_view(slab).spec, value_order, half) for slab in value_slabs]
    query_map = torch.cat([operand.permute(key_inverse) for operand in key_operands], dim=2)
    value_map = torch.cat([operand.permute(value_inverse) for operand in value_operands], dim=2).transpose(1, 2)
    key_middle, value_middle = (
        torch.cat([operand.middle for operand in operands]) for operands in (key_operands, value_operands)
    )
    order = quads_to_pairs(len(key_middle))
    # All slabs of values have tables, or none has.
    unit = values[0].spec.unit(half)
    halves = query_map.unflatten(1, (2, head_dim // 2)).transpose(2, 3)
    map_scale = halves.abs().amax(dim=(1, 2, 3)).clamp_min(_MIN_SCALE)
    halves = halves / map_scale[:, None, None, None]
    half_size = max(_MIN_OPERAND_SIZE, next_power_of_two(head_dim // 2))
    padded = halves.new_zeros(heads, 2, halves.shape[2], half_size)
    padded[..., : head_dim // 2] = halves[:, :, order]
    return KernelLayout(
        keys=keys,
        values=values,
        query_map=padded,
        map_scale=map_scale.contiguous(),
        field_bias=-key_middle[order].half().to(device),
        value_map=value_map.contiguous(),
        value_scale=torch.full((heads,), 1 / unit, dtype=torch.float32, device=device),
        value_middle=(value_middle * unit).to(device),
        means=torch.stack([state.get("key_mean", zero), state.get("value_mean", zero)]),
        inverses=torch.stack([key_inverse, value_inverse]),
        key_table=_table(key_slabs, state),
        value_table=_table(value_slabs, state),
    )


@dataclass(frozen=True)
class _Operand:
    """The components of one slab's operand.

    Attributes:
        components: codec component at each index; 0 for none, int64 [size].
        weights: factor of a map's column at each index; 0 for none, float32 [size].
        middle: of the field's range, in an operand that counts from 0 in half precision, and from -2^(bits - 1) in
            float32; 0 for entries of tables, float32 [size].
    """

    components: Tensor
    weights: Tensor
    middle: Tensor

    @classmethod
    def of(cls, slab: FieldSlab, spec: SlabSpec, order: Callable[[SlabSpec], list[int]], half: bool) -> _Operand:
        components = torch.zeros(spec.size, dtype=torch.int64)
        weights, middle = torch.zeros(2, spec.size, dtype=torch.float32)
        for index, field in enumerate(order(spec)):
            if 0 <= field < len(slab.components):
                scale = field_scale(spec, field)
                components[index] = slab.components[field]
                weights[index] = slab.weights[field] / scale
                if not spec.table:
                    middle[index] = scale * ((2**spec.bits - 1) if half else -1) / 2
        return cls(components, weights, middle)

    def permute(self, matrix: Tensor) -> Tensor:
        """Weighted columns of a matrix [heads, D, D] in the order of the operand, [heads, D, size]."""
        return matrix[..., self.components.to(matrix.device)] * self.weights.to(matrix.device)


def _table(slabs: Sequence[FieldSlab], state: dict[str, Tensor]) -> Tensor | None:
    names = {slab.table for slab in slabs if slab.table is not None}
    return state[names.pop()].contiguous() if names else None


@per_codec
def _angle_tables(codec: KVCodec, layer_idx: int, device: torch.device) -> list[Tensor]:
    """Those made so far, the longest last.

    Shorter ones stay, because graphs may read them. A table has twice the requested blocks, so that all of them
    together are at most twice as large as the last.
    """
    return []


def block_angles(codec: KVCodec, layer_idx: int, columns: int, device: torch.device) -> Tensor | None:
    """Cosine and sine of the first column of each block, [blocks, 2, D / 2], for at least `columns`.

    None if the codec has no blocks.
    """
    if codec.block_size is None:
        return None
    tables = _angle_tables(codec, layer_idx, device)
    blocks = -(-columns // codec.block_size) + _EXTRA_BLOCKS
    if not tables or len(tables[-1]) < blocks:
        # Twice as many as needed, so that a growing cache does not make a new table each time.
        starts = torch.arange(2 * blocks, device=device)[:, None] * codec.block_size
        angle = starts * codec.layer_state(layer_idx, device)["inv_freq"]
        table = torch.stack([angle.cos(), angle.sin()], dim=1).contiguous()
        publish(device)
        tables.append(table)
    return tables[-1]
