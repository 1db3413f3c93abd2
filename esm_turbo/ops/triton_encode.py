"""Encoding of keys and values by a Triton kernel, on CUDA. Imports triton only when the kernel runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any

import torch
from torch import Tensor

from esm_turbo.codecs import FieldSlab, KVCodec, LutCodec, Packed, TurboCodec
from esm_turbo.codecs.base import publish
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK
from esm_turbo.codecs.packing import GROUP_SIZE
from esm_turbo.ops import torch_ops
from esm_turbo.ops.triton_launch import (
    Options,
    Tuning,
    launch,
    operator,
    overlaps,
    per_codec,
    placeholder,
    strides,
)
from esm_turbo.ops.triton_layout import block_angles, neutral_maps, next_power_of_two, num_slots

# The maps of a head are held in a multiprocessor's shared memory.
_MAX_HEAD_DIM = 128
# The protected tokens of a row are one tile.
_MAX_PROTECTED = 64
_MIN_OPERAND_SIZE = 16
_ROWS_PER_WARP = 16
# Slabs begin at multiples of this number of bytes.
_ALIGNMENT = 16
_FIELD_BITS = (8, 4, 2, 1)
_TABLE_LEVELS = (8, 16)

DEFAULT_TUNING = Tuning(programs=264)


def can_run(codec: KVCodec, layer_idx: int, slots: int = 0) -> bool:
    """True if there is a kernel for a layer: codes are uniform or from a table, and stored as fields of slabs."""
    return slots <= _MAX_PROTECTED and _has_kernel(codec, layer_idx)


@per_codec
def _has_kernel(codec: KVCodec, layer_idx: int) -> bool:
    if not isinstance(codec, TurboCodec | LutCodec) or codec.geometry.head_dim > _MAX_HEAD_DIM:
        return False
    if isinstance(codec, LutCodec):
        sizes = {codec.state[f"{kind}_levels"].shape[-1] for kind in ("key", "value")}
        if len(sizes) > 1 or not sizes <= set(_TABLE_LEVELS):
            return False
    return all(codec.field_slabs(layer_idx, kind) for kind in ("key", "value"))


def new_counters(num_layers: int, batch_size: int, heads: int, device: torch.device) -> Tensor:
    """Counters of finished programs for `encode`, int32 [layers, 2 x batch x heads]: zeros before and after it."""
    return torch.zeros(num_layers, 2 * batch_size * heads, dtype=torch.int32, device=device)


def encode(
    codec: KVCodec,
    layer_idx: int,
    keys: Tensor,
    values: Tensor,
    *,
    order: Tensor | None = None,
    start: Tensor | None = None,
    columns: int | None = None,
    counts: Tensor | None = None,
    protected: Tensor | None = None,
    summarize: bool = True,
    counters: Tensor | None = None,
) -> tuple[Packed, Packed, Packed]:
    """Encodes one layer's keys and values in one launch, see `torch_ops.encode`, which serves layers without a kernel.

    With `start`, `columns` is needed, and greater than any token's column.
    `counters` is a row of `new_counters` that no other launch uses at the same time; None makes one. Packed tensors are
    uint8 [B, H, L, bytes], views of one allocation.

    Raises:
        ValueError: `columns` is missing.
    """
    batch_size, heads, tokens, _ = keys.shape
    slots = 0 if protected is None else protected.shape[1]
    if not can_run(codec, layer_idx, slots):
        return torch_ops.encode(
            codec,
            layer_idx,
            keys,
            values,
            order=order,
            start=start,
            columns=columns,
            counts=counts,
            protected=protected,
            summarize=summarize,
        )
    if start is not None and columns is None:
        raise ValueError("`columns` must be given where there is a `start`")
    layout = encode_layout(codec, layer_idx, keys.device)
    angles = block_angles(codec, layer_idx, tokens if columns is None else columns, keys.device)
    residual = summarize and isinstance(codec, TurboCodec)
    codes, residuals, special = encode_packed(
        keys,
        values,
        order,
        # Only keys that are relative to blocks depend on columns.
        None if angles is None else start,
        counts,
        protected,
        layout.tensors,
        angles,
        counters if residual else None,
        [sum(num_bytes for _, num_bytes in layout.slabs), layout.levels, *layout.field_bits],
        [*layout.mapped, residual],
    )
    packed: Packed = {}
    before, stored = 0, batch_size * heads * tokens
    for name, num_bytes in layout.slabs:
        slab = codes[before : before + stored * num_bytes]
        packed[name] = slab.view(batch_size, heads, tokens, num_bytes)
        before += _padded(stored) * num_bytes
    rows = {"key_residual": residuals[0], "value_residual": residuals[1]} if residual else {}
    unquantised = {} if protected is None else {"keys": special[0], "values": special[1]}
    return packed, unquantised, rows


def _encode_packed_fake(keys: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    protected, sizes, flags = others[4], *others[-2:]
    return _outputs(keys, protected, sizes[0], flags[2])


@operator("encode_packed", _encode_packed_fake, mutates_args=("counters",))
def encode_packed(
    keys: Tensor,
    values: Tensor,
    order: Tensor | None,
    start: Tensor | None,
    counts: Tensor | None,
    protected: Tensor | None,
    layout: list[Tensor],
    angles: Tensor | None,
    counters: Tensor | None,
    sizes: list[int],
    flags: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Encodes one layer's keys and values; one launch.

    Args:
        keys: after RoPE, [B, H, L, D].
        values: [B, H, L, D].
        order: see `encode`, like `start`, `counts` and `protected`.
        start: None without angles.
        counts: int64 [B].
        protected: int64 [B, P].
        layout: `EncodeLayout.tensors`.
        angles: cosine and sine of every block's first column, [blocks, 2, D / 2]; None for keys without blocks.
        counters: zeros, int32 [2 B H]; None to make them.
        sizes: bytes per token and head; levels of a table, or 0; the union of field widths of keys, and of values.
        flags: whether keys are mapped, whether values are mapped, and whether mean residuals are computed.

    Returns:
        All slabs, uint8, each with room for `_padded` tokens; mean residuals, bfloat16 [2, B, H, 1, D]; protected
        tokens, bfloat16 [2, B, H, P, D]. What is not computed is empty.
    """
    from esm_turbo.ops.kernels import encode as kernels

    tuning = DEFAULT_TUNING
    batch_size, heads, tokens, head_dim = keys.shape
    if values.shape != keys.shape:
        raise ValueError(f"keys and values must have one shape, got {list(keys.shape)} and {list(values.shape)}")
    slots = 0 if protected is None else protected.shape[1]
    if slots > tuning.tile:
        raise ValueError(f"at most {tuning.tile} tokens of a row can be protected, got {slots}")
    bytes_per_token, levels, *field_bits = sizes
    *mapped, residual = flags
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))
    order, start, counts, protected = (None if x is None else x.contiguous() for x in (order, start, counts, protected))
    size = _operand_size(head_dim)
    codes, residuals, special = _outputs(keys, protected, bytes_per_token, residual)
    if not keys.numel():
        return codes, residuals.zero_(), special.zero_()
    # A row that begins inside a tile may have one tile more; the protected tokens are another one.
    spread = tokens if start is None else tokens + tuning.tile - 1
    tiles = -(-spread // tuning.tile) + (slots > 0)
    splits = _num_splits(tiles, 2 * heads * batch_size, tuning.programs or 0)
    partial = placeholder(torch.float32, keys.device)
    if residual and splits > 1:
        partial = torch.empty(2 * batch_size * heads * splits * size, dtype=torch.float32, device=keys.device)
        if counters is None:
            counters = new_counters(1, batch_size, heads, keys.device)
    overlap = overlaps(keys.device)
    indices, number = placeholder(torch.int64, keys.device), placeholder(torch.int32, keys.device)
    launch(
        kernels.encode_context,
        (splits, 2 * heads, batch_size),
        keys.device,
        Options(_num_warps(tuning, size), tuning.stages, tuning.registers, overlap),
        x_ptrs=(keys, values),
        order_ptr=indices if order is None else order,
        start_ptr=indices if start is None else start,
        count_ptr=indices if counts is None else counts,
        protected_ptr=indices if protected is None else protected,
        map_ptrs=tuple(layout[0:2]),
        mean_ptrs=tuple(layout[2:4]),
        inverse_ptrs=tuple(layout[4:6]),
        levels_ptrs=tuple(layout[6:8]),
        angle_ptr=angles,
        profile_ptr=layout[8],
        codes_ptr=codes,
        residual_ptr=residuals,
        special_ptr=special,
        partial_ptr=partial,
        counter_ptr=number if counters is None else counters,
        **strides(k=keys, v=values),
        num_tokens=tokens,
        num_blocks=1 if angles is None else angles.shape[0],
        padded_tokens=_padded(batch_size * heads * tokens),
        num_slots=slots,
        has_order=int(order is not None),
        has_start=int(start is not None),
        has_count=int(counts is not None),
        HEAD_DIM=head_dim,
        N=size,
        HALF=_operand_size(head_dim // 2),
        T=tuning.tile,
        BLOCK=KEY_BLOCK,
        PARTS=_num_parts(tuning, size),
        SLOTS=num_slots(slots),
        MAPPED=tuple(mapped),
        FIELDS=tuple(field_bits),
        LEVELS=levels,
        RESIDUAL=residual,
        OVERLAP=overlap,
    )
    return codes, residuals, special


def _outputs(
    keys: Tensor, protected: Tensor | None, bytes_per_token: int, residual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch_size, heads, tokens, head_dim = keys.shape
    slots = 0 if protected is None else protected.shape[1]
    return (
        keys.new_empty(_padded(batch_size * heads * tokens) * bytes_per_token, dtype=torch.uint8),
        keys.new_empty((2, batch_size, heads, int(residual), head_dim), dtype=torch.bfloat16),
        keys.new_empty((2, batch_size, heads, slots, head_dim), dtype=torch.bfloat16),
    )


def _padded(tokens: int) -> int:
    """Tokens per slab, including those that only align the next slab."""
    return -(-tokens // _ALIGNMENT) * _ALIGNMENT


def _num_splits(tiles: int, programs: int, wanted: int) -> int:
    """Number of programs over which a row's tiles are distributed; depends on shapes alone."""
    splits = max(1, min(tiles, -(-wanted // programs)))
    return -(-tiles // -(-tiles // splits))


def _num_warps(tuning: Tuning, size: int) -> int:
    """Warps of a program whose operands have `size` components."""
    return tuning.warps or (8 if size >= _MAX_HEAD_DIM else 4)


def _num_parts(tuning: Tuning, size: int) -> int:
    """Number of parts of a product's components that are held by different warps."""
    return max(1, min(_num_warps(tuning, size) * _ROWS_PER_WARP // tuning.tile, size // GROUP_SIZE))


def _operand_size(count: int) -> int:
    return max(_MIN_OPERAND_SIZE, next_power_of_two(count))


@dataclass(frozen=True)
class EncodeLayout:
    """One layer of a codec as the kernel needs it. N is the next power of two of `head_dim`, at least 16.

    Attributes:
        tensors: of keys and of values each: the map, transposed, its rows in `column_order`, rounded to TF32 and then
            the rest, [H, 2, N, D]; the mean [H, D]; the inverse map [H, D, D]; the levels of a table [H, levels], or
            zeros. Then the table of both profiles, see `profile`, int32 [2, 5, N / 8].
        slabs: name and bytes per token and head, in the order in memory.
        field_bits: unions (bitwise or) of the widths of all fields of all layers, of keys and of values.
        levels: of a table; 0 for uniform codes.
        mapped: whether keys are mapped, and whether values are.
    """

    tensors: list[Tensor]
    slabs: list[tuple[str, int]]
    field_bits: list[int]
    levels: int
    mapped: list[bool]


@per_codec
def encode_layout(codec: KVCodec, layer_idx: int, device: torch.device) -> EncodeLayout:
    """The layout of one layer of a codec that `can_run`; made once."""
    geometry, state = codec.geometry, codec.layer_state(layer_idx, device)
    heads, head_dim = geometry.num_heads, geometry.head_dim
    size = _operand_size(head_dim)
    identity, zero = neutral_maps(geometry, device)
    order = torch.tensor(column_order(size, _num_parts(DEFAULT_TUNING, size)), device=device)
    maps, means, inverses, tables, profiles, mapped = [], [], [], [], [], []
    slabs: list[tuple[str, int]] = []
    for kind in ("key", "value"):
        mapped.append(f"{kind}_map" in state or f"{kind}_mean" in state or (kind == "key" and bool(codec.block_size)))
        padded = zero.new_zeros(heads, size, head_dim)
        padded[:, :head_dim] = state.get(f"{kind}_map", identity)
        padded = padded[:, order]
        rounded = _tf32(padded)
        maps.append(torch.stack([rounded, _tf32(padded - rounded)], dim=1).contiguous())
        means.append(state.get(f"{kind}_mean", zero).contiguous())
        inverses.append(state.get(f"{kind}_inverse", identity).contiguous())
        tables.append(state.get(f"{kind}_levels", zero).contiguous())
        found = codec.field_slabs(layer_idx, kind)
        profiles.append(profile(found, size, sum(num_bytes for _, num_bytes in slabs)))
        slabs += [(slab.name, _num_bytes(slab)) for slab in found]
    tensors = [*maps, *means, *inverses, *tables, torch.tensor(profiles, dtype=torch.int32, device=device)]
    levels = tables[0].shape[-1] if isinstance(codec, LutCodec) else 0
    publish(device)
    return EncodeLayout(tensors, slabs, _field_bits(codec), levels, mapped)


@per_codec
def _field_bits(codec: KVCodec) -> list[int]:
    """Unions of the widths of all fields, of keys and of values; of all layers, so that they share a kernel."""
    layers = range(codec.geometry.num_layers)
    return [
        functools.reduce(or_, (slab.bits for layer in layers for slab in codec.field_slabs(layer, kind)))
        for kind in ("key", "value")
    ]


def column_order(size: int, parts: int) -> list[int]:
    """The component at each column of a map, chosen so that a lane's results are neighbours.

    In a tensor core's result four lanes share a row: of every eight columns, lane q holds columns 2q and 2q + 1.
    """
    part = size // parts
    quarter = part // 4
    order = []
    for column in range(size):
        first, inner = column // part * part, column % part
        eight, lane, low = inner // 8, inner % 8 // 2, inner % 2
        order.append(first + lane * quarter + 2 * eight + low)
    return order


def profile(slabs: Sequence[FieldSlab], size: int, before: int) -> list[list[int]]:
    """Destinations of the codes of every group of eight components.

    Args:
        slabs: of a layer's keys or values.
        size: components, including padding.
        before: bytes per token and head in all preceding slabs.

    Returns:
        The groups' widths, and for fields of 8, 4, 2 and 1 bits three numbers packed as 12, 10 and 10 bits: bytes per
        token and head in all preceding slabs, the first byte of the group in its slab, and bytes per token and head in
        its slab.
    """
    groups = size // GROUP_SIZE
    widths = [0] * groups
    locations = {bits: [0] * groups for bits in _FIELD_BITS}
    for slab in slabs:
        num_bytes = _num_bytes(slab)
        for number in range(len(slab.components) // GROUP_SIZE):
            group = slab.components[GROUP_SIZE * number] // GROUP_SIZE
            widths[group] += slab.bits
            locations[slab.bits][group] = before << 20 | number * slab.bits << 10 | num_bytes
        before += num_bytes
    return [widths, *(locations[bits] for bits in _FIELD_BITS)]


def _num_bytes(slab: FieldSlab) -> int:
    return len(slab.components) * slab.bits // 8


def _tf32(x: Tensor) -> Tensor:
    """Rounded to the 11 significant bits that tensor cores multiply."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & -0x2000).view(torch.float32)
