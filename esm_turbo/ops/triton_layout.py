"""How a codec's fields lie in the operands of the Triton kernels, and the maps that go with it; triton is not needed.

A kernel reads a slab as [tokens, elements] of 8, 16 or 32 bits, and unpacks it in the order in which lanes of a tensor
core's operand hold it. Here that order is written down once, as the component at every place of an operand, and the
maps of the query and of the output are brought into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esm_turbo.codecs import FieldSlab, KVCodec, Packed

_SMALLEST_OPERAND = 16
# A tensor core's operand spreads the components of a key over four lanes, those of a value over eight.
_KEY_LANES, _VALUE_LANES = 4, 8
# Keys that vary less are all alike; by what is less, their mean could not be divided.
_LEAST_SCALE = 1e-20
# Programs work on up to so many blocks at once, the last of them beyond the end.
_ANGLES_BEYOND = 16
_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class SlabView:
    """A slab as a kernel sees it.

    Attributes:
        name: of the packed tensor.
        bits: of a field.
        words: that are loaded for a token and head, of four bytes, or one of fewer; a power of two.
        stored: how many of them there are; the others are loaded as zeros.
        elements: what lanes take of them: a word each, or equal parts of a word.
        element_bits: of an element.
        size: components of the operand, padded with zeros.
        table: whether fields are looked up in a table.
    """

    name: str
    bits: int
    words: int
    stored: int
    elements: int
    element_bits: int
    size: int
    table: bool

    @property
    def spec(self) -> tuple[int, int, int, int, int, bool, int]:
        return self.bits, self.words, self.elements, self.element_bits, self.size, self.table, self.stored

    @property
    def fields(self) -> int:
        """Of an element."""
        return self.element_bits // self.bits

    def of(self, packed: Packed) -> Tensor:
        """The slab's tensor as words, [..., words]."""
        slab = packed[self.name].contiguous()
        return slab.view(_WORD_DTYPES[slab.shape[-1] // self.stored])


def key_view(slab: FieldSlab) -> SlabView:
    """How the kernels read a slab of keys."""
    return _view(slab, _KEY_LANES)


def value_view(slab: FieldSlab) -> SlabView:
    """How the kernels read a slab of values."""
    return _view(slab, _VALUE_LANES)


def _view(slab: FieldSlab, lanes: int) -> SlabView:
    stored = max(1, len(slab.components) * slab.bits // 32)
    words, components = power_of_two(stored), power_of_two(len(slab.components))
    elements = max(words, min(lanes, components))
    size = max(_SMALLEST_OPERAND, components)
    element_bits = components * slab.bits // elements
    return SlabView(slab.name, slab.bits, words, stored, elements, element_bits, size, slab.table is not None)


def power_of_two(count: int) -> int:
    """The smallest that is not smaller."""
    return 1 << (count - 1).bit_length()


def key_order(view: SlabView) -> list[int]:
    """Which of the slab's components stands at every place of a key operand; -1, or beyond the last, for none.

    A lane holds four components in a row: two fields from each half of its element.
    """
    half, pairs, each = view.fields // 2, min(2, view.fields // 2), view.elements // _KEY_LANES
    order = []
    for high in range(half // pairs):
        for index in range(view.elements):
            element = index % _KEY_LANES * each + index // _KEY_LANES
            for pair in range(2):
                for upper in range(2):
                    empty = pair >= pairs
                    if not empty or view.size > 2 * view.elements:
                        order.append(-1 if empty else element * view.fields + high * pairs + pair + upper * half)
    return order


def in_pairs(count: int) -> list[int]:
    """Which place of a key operand is computed at every column of the product that makes mapped queries.

    Of sixteen places a lane multiplies four in a row, but a product leaves it pairs of either eight.
    """
    return [c // 16 * 16 + c % 8 // 2 * 4 + c // 8 % 2 * 2 + c % 2 for c in range(count)]


def value_order(view: SlabView) -> list[int]:
    """Which of the slab's components stands at every place of a value operand, or beyond the last; without padding."""
    return [element * view.fields + field for field in range(view.fields) for element in range(view.elements)]


def field_scale(view: SlabView, index: int) -> float:
    """By how much a field counts too much: kernels leave it where it is in its byte."""
    return 1.0 if view.table else 2.0 ** (index * view.bits % 8)


@dataclass(frozen=True)
class KernelLayout:
    """What the kernels need to know of one layer of a codec.

    Attributes:
        keys: views of the key slabs.
        values: views of the value slabs.
        query_map: the query's map to every place of the key operands, in the order of `in_pairs`, halves of the head
            apart and padded with zeros: float32 [heads, 2, places, half], its largest entry of each head 1.
        query_scale: what that entry was, float32 [heads].
        corrections: what must be added for what the fields of the key operands count too much, at every place, in the
            order of `query_map`, in the first two of 16 parts: -1024 where they are masked into half precision, and
            less the middle of their range; float16 [16, places].
        value_map: from every place of the value operands to the output, float32 [heads, places, head_dim].
        value_mean: the mean, and what fields counted from -2^(bits - 1) lack, float32 [heads, head_dim].
        means: of keys and of values, float32 [2, heads, head_dim].
        inverses: the codec's maps from what is stored, of keys and of values, float32 [2, heads, head_dim, head_dim].
        key_table: float32 [heads, 16], or None.
        value_table: float32 [heads, 16], or None.
    """

    keys: tuple[SlabView, ...]
    values: tuple[SlabView, ...]
    query_map: Tensor
    query_scale: Tensor
    corrections: Tensor
    value_map: Tensor
    value_mean: Tensor
    means: Tensor
    inverses: Tensor
    key_table: Tensor | None
    value_table: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """All but the tables."""
        return [
            self.query_map,
            self.query_scale,
            self.corrections,
            self.value_map,
            self.value_mean,
            self.means,
            self.inverses,
        ]


def triton_layout(codec: KVCodec, layer_idx: int, stored: Sequence[str], device: torch.device) -> KernelLayout:
    """The layout of one layer.

    Args:
        codec: one with `field_slabs`.
        layer_idx: which layer.
        stored: names of the packed tensors that are there.
        device: of the maps.
    """
    geometry, state = codec.geometry, codec.layer_state(layer_idx, device)
    heads, head_dim = geometry.num_heads, geometry.head_dim
    identity = torch.eye(head_dim, device=device).expand(heads, -1, -1)
    zero = torch.zeros(heads, head_dim, device=device)
    key_inverse = state.get("key_inverse", identity)
    value_inverse = state.get("value_inverse", identity)
    value_mean = state.get("value_mean", zero)
    key_slabs, value_slabs = (
        [slab for slab in codec.field_slabs(layer_idx, kind) if slab.name in stored] for kind in ("key", "value")
    )
    keys, values = tuple(map(key_view, key_slabs)), tuple(map(value_view, value_slabs))
    key_places = [_Places.of(slab, view, key_order(view)) for slab, view in zip(key_slabs, keys, strict=True)]
    value_places = [_Places.of(slab, view, value_order(view)) for slab, view in zip(value_slabs, values, strict=True)]
    query_map = [places.of_columns(key_inverse) for places in key_places]
    value_map = torch.cat([places.of_columns(value_inverse) for places in value_places], dim=2).transpose(1, 2)
    middle = torch.cat([places.middle for places in key_places])
    corrections = torch.zeros(_SMALLEST_OPERAND, len(middle), dtype=torch.float16)
    order = in_pairs(len(middle))
    corrections[:2] = -torch.stack([1024 * (middle > 0), middle])[:, order]
    lacking = torch.cat([places.lacking for places in value_places]).to(device)
    maps = torch.cat(query_map, dim=2).unflatten(1, (2, head_dim // 2)).transpose(2, 3)
    scale = maps.abs().amax(dim=(1, 2, 3)).clamp_min(_LEAST_SCALE)
    maps = maps / scale[:, None, None, None]
    half_size = max(_SMALLEST_OPERAND, power_of_two(head_dim // 2))
    padded = maps.new_zeros(heads, 2, maps.shape[2], half_size)
    padded[..., : head_dim // 2] = maps[:, :, order]
    return KernelLayout(
        keys,
        values,
        padded,
        scale.contiguous(),
        corrections.to(device),
        value_map.contiguous(),
        (value_mean + lacking @ value_map).contiguous(),
        torch.stack([state.get("key_mean", zero), value_mean]),
        torch.stack([key_inverse, value_inverse]),
        _table(key_slabs, state),
        _table(value_slabs, state),
    )


@dataclass(frozen=True)
class _Places:
    """The places of one slab's operand.

    Attributes:
        components: of every place; 0 for none.
        weights: by which a map's column is multiplied, 0 for none, float32 [size].
        middle: of the field's range, as it stands in an operand that counts from 0, float32 [size].
        lacking: what an operand that counts from -2^(bits - 1) is short of, float32 [size].
    """

    components: Tensor
    weights: Tensor
    middle: Tensor
    lacking: Tensor

    @classmethod
    def of(cls, slab: FieldSlab, view: SlabView, order: Sequence[int]) -> _Places:
        components = torch.zeros(view.size, dtype=torch.int64)
        weights, middle, lacking = (torch.zeros(view.size) for _ in range(3))
        for place, index in enumerate(order):
            if 0 <= index < len(slab.components):
                scale = field_scale(view, index)
                components[place] = slab.components[index]
                weights[place] = slab.weights[index] / scale
                if not view.table:
                    middle[place] = scale * (2**view.bits - 1) / 2
                    lacking[place] = scale / 2
        return cls(components, weights, middle, lacking)

    def of_columns(self, columns: Tensor) -> Tensor:
        """Columns [heads, head_dim, head_dim] at every place, weighed, [heads, head_dim, size]."""
        return columns[..., self.components.to(columns.device)] * self.weights.to(columns.device)


def _table(slabs: Sequence[FieldSlab], state: dict[str, Tensor]) -> Tensor | None:
    names = {slab.table for slab in slabs if slab.table is not None}
    return state[names.pop()].contiguous() if names else None


# Of a layer on a device, the longest last. Shorter ones stay, for graphs may read them; a table has twice what it was
# made for, so that all together have at most twice the last one's.
_angles: WeakKeyDictionary[KVCodec, dict[tuple[int, torch.device], list[Tensor]]] = WeakKeyDictionary()


def block_angles(codec: KVCodec, layer_idx: int, columns: int, device: torch.device) -> Tensor | None:
    """Cosine and sine of blocks' first columns, [blocks, 2, D / 2], for `columns` and more; None without blocks."""
    if codec.block_size is None:
        return None
    made = _angles.setdefault(codec, {}).setdefault((layer_idx, device), [])
    blocks = -(-columns // codec.block_size) + _ANGLES_BEYOND
    if not made or len(made[-1]) < blocks:
        # Twice as many as needed, so that a cache that grows does not make a new one each time.
        starts = torch.arange(2 * blocks, device=device)[:, None] * codec.block_size
        angle = starts * codec.layer_state(layer_idx, device)["inv_freq"]
        made.append(torch.stack([angle.cos(), angle.sin()], dim=1).contiguous())
    return made[-1]
