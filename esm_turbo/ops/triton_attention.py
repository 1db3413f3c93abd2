"""Attention over packed contexts by Triton kernels, on CUDA. Imports triton only when a kernel runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import functional

from esm_turbo.codecs import KVCodec, Packed, PackedContext
from esm_turbo.codecs.base import publish
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK
from esm_turbo.codecs.row_index import RowIndex
from esm_turbo.files.model_contents import version_of
from esm_turbo.ops import decoded_attention, torch_ops
from esm_turbo.ops.attention_plan import MMA_ROWS, AttentionPlan, AttentionTuning, attention_plan, queries_at_once
from esm_turbo.ops.triton_launch import (
    empty_by_token,
    fence,
    is_plain,
    operator,
    overlaps,
    per_codec,
    placeholder,
)
from esm_turbo.ops.triton_layout import (
    KernelLayout,
    block_angles,
    key_view,
    neutral_maps,
    next_power_of_two,
    triton_layout,
    value_view,
)

_WORD_BITS = 32
# Sign and exponent of a float32 number.
_EXPONENT = -(1 << 23)
# Limit of the summed sizes of a token's operands: the query's maps to them are held in shared memory.
_MAX_OPERAND_SIZE = 256

DEFAULT_TUNING = AttentionTuning(warps=1, stages=3, registers=168)


@per_codec
def can_run(codec: KVCodec) -> bool:
    """True if there are kernels for a codec: all components are fields of slabs, and their operands small enough."""
    for layer_idx in range(codec.geometry.num_layers):
        for kind, view in (("key", key_view), ("value", value_view)):
            slabs = codec.field_slabs(layer_idx, kind)
            if not slabs or sum(view(slab).spec.size for slab in slabs) > _MAX_OPERAND_SIZE:
                return False
    return True


def extend_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    context: PackedContext,
    codec: KVCodec,
    layer_idx: int,
) -> Tensor:
    """See `torch_ops.extend_attention`, which also serves codecs without kernels (`can_run`)."""
    if not query.numel():
        return empty_by_token(query)
    # Where kernels read one layer of a forward, they read them all.
    if not context.common:
        if decoded_attention.pays(query, context, codec):
            return decoded_attention.extend_attention(query, keys, values, mask, context, codec, layer_idx)
        if not can_run(codec):
            return torch_ops.extend_attention(query, keys, values, mask, context, codec, layer_idx)
    layout = _layout(codec, layer_idx, tuple(context.packed), query.device, query.dtype)
    packed, shape = context.packed, next(iter(context.packed.values())).shape
    slots = context.protected["keys"].shape[2] if context.protected else 0
    protected = [context.protected[name] for name in ("keys", "values") if slots]
    residuals = [context.rows[name] for name in ("key_residual", "value_residual") if name in context.rows]
    angles = block_angles(codec, layer_idx, shape[2], query.device)
    of_layer = layout.tensors, layout.tables, residuals, angles, protected
    common, alike = context.common, None
    if common is not None and is_plain():
        steps = [x.stride() for x in (query, keys, values, *packed.values())]
        alike = (query.dtype, query.shape, shape, len(residuals), slots, steps)
        # Compared, which takes the host half as long as to look it up.
        known: tuple[object, _Reader] | None = common.get(layout.kind)
        if known is not None and known[0] == alike:
            key_slabs, value_slabs = (
                [packed[name] for name in layout.names[0]],
                [packed[name] for name in layout.names[1]],
            )
            return known[1].attend(query, keys, values, key_slabs, value_slabs, *of_layer)
    lengths, protected_columns, visible = context.lengths, context.protected_columns, context.visible_words
    if visible is None and context.visible is not None:
        visible = pack_mask(context.visible)
    if lengths is None:
        lengths = torch.full((shape[0],), shape[2], dtype=torch.int64, device=query.device)
        protected_columns, visible = None, None if context.mask is None else pack_mask(context.mask)
    if protected_columns is None:
        protected_columns = torch.empty(shape[0], 0, dtype=torch.int32, device=query.device)
    inputs = AttentionInputs(
        query,
        keys,
        values,
        mask,
        [view.of(packed) for view in layout.keys],
        [view.of(packed) for view in layout.values],
        *of_layer[:-1],
        lengths,
        protected_columns,
        protected,
        context.protected_mask if protected else None,
        visible,
        *layout.specs,
        *_named(context.index, query),
    )
    if common is None or alike is None:
        return attend_packed(*inputs)
    reader, tensors = _reader(inputs)
    used = [*tensors[:3], *tensors[3], *tensors[4], *tensors[-1]]
    slabs = [packed[name] for names in layout.names for name in names]
    if _addresses(used) == _addresses([query, keys, values, *slabs, *protected]):
        common[layout.kind] = alike, reader
    return reader.attend(*tensors)


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _named(index: RowIndex | None, query: Tensor) -> tuple[list[Tensor], int]:
    """`named` and `most_queries` of `AttentionInputs`. The tables are made with the first layer."""
    device, n = query.device, query.shape[2]
    if index is None:
        return [], 0
    most = index.most_rows * n
    contexts, made = index.on(device), len(index.made)
    tiles = index.tiles(n, queries_at_once(most)[0], device)
    if len(index.made) > made:
        fence(device)
    return [tiles, contexts], most


class AttentionInputs(NamedTuple):
    """Everything that attention of new tokens to a packed context and to each other reads.

    Shapes: B rows of the extension, C contexts (B, or 1 shared by all rows, or any that rows name), H heads, n new
    tokens, D `head_dim`, L columns, P slots.

    Attributes:
        query: of the new tokens, after RoPE and scaling, [B, H, n, D].
        keys: of the new tokens, after RoPE, [B, H, n, D].
        values: of the new tokens, [B, H, n, D].
        mask: which new tokens are visible, bool [B, n]; None for all.
        key_slabs: words of each slab, [C, H, L, words], see `SlabView`.
        value_slabs: likewise.
        layout: `KernelLayout.tensors`.
        tables: of keys and of values, [H, 16] each, or empty; float32, or float16 for queries of half precision.
        residuals: mean residuals of keys and of values, [C, H, 1, D] each, or empty.
        angles: cosine and sine of every block's first column, [blocks, 2, D / 2]; None for keys without blocks.
        lengths: of the contexts, [C].
        protected_columns: columns that are not read from slabs, int32 [C, P], -1 for none.
        protected: stored keys and values of protected tokens, [C, H, P, D] each, or empty.
        protected_mask: which protected tokens a row sees, bool [B, P]; None for all.
        visible: which columns a row sees, see `pack_mask`, int32 [B, words]; None for all.
        key_specs: the `SlabSpec` of every key slab, one after the other.
        value_specs: likewise.
        named: where rows name their contexts, the tiles of the queries (`RowIndex.tiles`), and each row's context,
            int64 [B]; or empty.
        most_queries: that follow each other and read the same context, if rows name theirs.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    key_slabs: list[Tensor]
    value_slabs: list[Tensor]
    layout: list[Tensor]
    tables: list[Tensor]
    residuals: list[Tensor]
    angles: Tensor | None
    lengths: Tensor
    protected_columns: Tensor
    protected: list[Tensor]
    protected_mask: Tensor | None
    visible: Tensor | None
    key_specs: list[int]
    value_specs: list[int]
    named: list[Tensor]
    most_queries: int


@operator(
    "attend_packed",
    lambda query, *_: empty_by_token(query),
    schema="(Tensor query, Tensor keys, Tensor values, Tensor? mask, Tensor[] key_slabs, Tensor[] value_slabs,"
    " Tensor[] layout, Tensor[] tables, Tensor[] residuals, Tensor? angles, Tensor lengths, Tensor protected_columns,"
    " Tensor[] protected, Tensor? protected_mask, Tensor? visible, SymInt[] key_specs, SymInt[] value_specs,"
    " Tensor[] named, SymInt most_queries) -> Tensor",
)
def attend_packed(*inputs: Any) -> Tensor:
    """Attention of new tokens to a packed context and to each other; two launches.

    Args:
        *inputs: the fields of `AttentionInputs`.

    Returns:
        [B, H, n, D], in the query's dtype.
    """
    reader, tensors = _reader(AttentionInputs(*inputs))
    return reader.attend(*tensors)


class _Reader(NamedTuple):
    """Reads layers that differ in nothing but the tensors of `attend`.

    Attributes: see `AttentionInputs`; masks are bytes.
    """

    plan: AttentionPlan
    lengths: Tensor
    protected_columns: Tensor
    visible: Tensor
    tiles: Tensor
    mask: Tensor
    protected_mask: Tensor

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_slabs: list[Tensor],
        value_slabs: list[Tensor],
        layout: list[Tensor],
        tables: list[Tensor],
        residuals: list[Tensor],
        angles: Tensor | None,
        protected: list[Tensor],
    ) -> Tensor:
        """See `AttentionInputs`; two launches."""
        plan = self.plan
        query_map, map_scale, field_bias, value_map, value_scale, value_middle, means, inverses = layout
        # The kernels do not read the tables and angles that a codec does not have.
        key_table, value_table = tables or (map_scale, map_scale)
        key_residual, value_residual = residuals or (None, None)
        protected_keys = protected_values = map_scale
        if protected:
            _, _, protected_keys, protected_values = _inverse_transformed(protected, inverses, means)
        # Accumulators, maxima and totals of all parts.
        parts = torch.empty(plan.part_numel, dtype=torch.float32, device=query.device)
        part_acc, part_max, part_total = torch.split_with_sizes(parts, plan.part_sizes)
        plan.attend_context(
            query_ptr=query,
            map_ptr=query_map,
            map_scale_ptr=map_scale,
            field_bias_ptr=field_bias,
            mean_ptr=means,
            key_residual_ptr=key_residual,
            angle_ptr=map_scale if angles is None else angles,
            key_slab_ptrs=key_slabs,
            value_slab_ptrs=value_slabs,
            key_table_ptr=key_table,
            value_table_ptr=value_table,
            tile_ptr=self.tiles,
            length_ptr=self.lengths,
            protected_ptr=self.protected_columns,
            mask_ptr=self.visible,
            part_acc_ptr=part_acc,
            part_max_ptr=part_max,
            part_total_ptr=part_total,
        )
        output = empty_by_token(query)
        plan.merge(
            query_ptr=query,
            key_ptr=keys,
            value_ptr=values,
            new_mask_ptr=self.mask,
            protected_key_ptr=protected_keys,
            protected_value_ptr=protected_values,
            protected_mask_ptr=self.protected_mask,
            tile_ptr=self.tiles,
            part_acc_ptr=part_acc,
            part_max_ptr=part_max,
            part_total_ptr=part_total,
            value_map_ptr=value_map,
            value_scale_ptr=value_scale,
            value_middle_ptr=value_middle,
            mean_ptr=means,
            value_residual_ptr=value_residual,
            output_ptr=output,
        )
        return output


def _reader(inputs: AttentionInputs) -> tuple[_Reader, tuple[Any, ...]]:
    """The object that computes `attend_packed`, and the arguments of its `attend`."""
    query, keys, values, mask, key_slabs, value_slabs, layout, tables, residuals, angles, *_ = inputs
    lengths, protected_columns, protected = inputs.lengths, inputs.protected_columns, inputs.protected
    protected_mask, visible, named, most_queries = (
        inputs.protected_mask,
        inputs.visible,
        inputs.named,
        inputs.most_queries,
    )
    batch_size, device = query.shape[0], query.device
    contexts, columns = key_slabs[0].shape[0], key_slabs[0].shape[2]
    _check(query, keys, values, 1 if named else contexts, mask, protected_mask)
    key_slabs, value_slabs, slab_columns = _with_one_stride(key_slabs, value_slabs, DEFAULT_TUNING.tile)
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values))
    tiles, index = named or (placeholder(torch.int32, device),) * 2
    if protected and named and contexts > batch_size:
        # Of many contexts few are read: the protected tokens of each row's are then mapped anew.
        protected = [x[index] for x in protected]
    plan = attention_plan(
        DEFAULT_TUNING,
        query.shape,
        (query.stride(), keys.stride(), values.stride()),
        query.dtype,
        device,
        (contexts, columns, slab_columns),
        (tuple(inputs.key_specs), tuple(inputs.value_specs)),
        (tuple([x.dtype for x in key_slabs]), tuple([x.dtype for x in value_slabs])),
        (layout[0].shape, layout[3].shape),
        (len(tiles), most_queries) if named else None,
        (protected_columns.shape[1], protected[0].shape[2] if protected else 0),
        (mask is not None, protected_mask is not None, visible is not None),
        (bool(tables), bool(residuals), angles is not None, overlaps(device)),
    )
    words = placeholder(torch.int32, device) if visible is None else _of_all_rows(visible, batch_size)
    new_mask, slot_mask = (_bytes_of(x, batch_size, device) for x in (mask, protected_mask))
    reader = _Reader(plan, lengths, protected_columns, words, tiles, new_mask, slot_mask)
    return reader, (query, keys, values, key_slabs, value_slabs, layout, tables, residuals, angles, protected)


def _with_one_stride(
    key_slabs: list[Tensor], value_slabs: list[Tensor], tile: int
) -> tuple[list[Tensor], list[Tensor], int]:
    """Slabs [C, H, L, elements] whose heads all begin the same number of columns after each other, and that number.

    Slabs of a cache that grows in place are views of buffers with more columns. Others are copied unless contiguous, or
    if there are fewer columns than a kernel loads at a time.
    """
    slabs, heads, columns = [*key_slabs, *value_slabs], key_slabs[0].shape[1], key_slabs[0].shape[2]
    slab_columns = slabs[0].stride(1) // slabs[0].stride(2)
    for slab in slabs:
        size = slab.shape[3]
        if slab.stride() != (heads * slab_columns * size, slab_columns * size, size, 1):
            slab_columns = columns
            break
    if slab_columns < tile:
        slabs = [functional.pad(slab, (0, 0, 0, tile - columns)) for slab in slabs]
        slab_columns = tile
    elif slab_columns == columns:
        slabs = [slab.contiguous() for slab in slabs]
    return slabs[: len(key_slabs)], slabs[len(key_slabs) :], slab_columns


def _bytes_of(mask: Tensor | None, batch_size: int, device: torch.device) -> Tensor:
    """A mask as kernels read it, [batch, n]; something else for none."""
    if mask is None:
        return placeholder(torch.uint8, device)
    return _of_all_rows(mask, batch_size).view(torch.uint8)


def _of_all_rows(x: Tensor, batch_size: int) -> Tensor:
    """x [batch or 1, n] as [batch, n], contiguous."""
    return x if len(x) == batch_size and x.is_contiguous() else x.expand(batch_size, -1).contiguous()


def pack_mask(mask: Tensor) -> Tensor:
    """A mask of columns, bool [B, L], as bits of words, the first column's lowest: int32 [B, 2 blocks]."""
    if mask.dtype != torch.bool:
        raise ValueError("masks must be boolean")
    rows, columns = mask.shape
    words = max(1, -(-columns // KEY_BLOCK)) * (KEY_BLOCK // _WORD_BITS)
    bits = functional.pad(mask, (0, words * _WORD_BITS - columns)).view(rows, words, _WORD_BITS).to(torch.int32)
    # Every bit is added once, so that the sum is their union; the highest one is the sign.
    return (bits << torch.arange(_WORD_BITS, dtype=torch.int32, device=mask.device)).sum(2, dtype=torch.int32)


def _check(query: Tensor, keys: Tensor, values: Tensor, contexts: int, *masks: Tensor | None) -> None:
    """Raises for shapes and dtypes that the kernels would misread."""
    if not query.shape == keys.shape == values.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (query, keys, values))
        raise ValueError(f"queries, keys and values must have one shape, got {shapes}")
    if contexts not in (1, query.shape[0]):
        raise ValueError(f"{query.shape[0]} rows need as many contexts, or one for all of them; got {contexts}")
    if any(mask is not None and mask.dtype != torch.bool for mask in masks):
        raise ValueError("masks must be boolean")


class _Exact(NamedTuple):
    """Keys and values of protected tokens in the model's coordinates, made of this version of the stored ones."""

    stored: ReferenceType[Tensor]
    version: int
    keys: Tensor
    values: Tensor


# By the id of the stored keys, while these live. A dictionary with weak keys takes several times as long to look up.
_exact: dict[int, _Exact] = {}


def _known_exact(stored_keys: Tensor) -> _Exact | None:
    known = _exact.get(id(stored_keys))
    if known is None or known.stored() is not stored_keys or known.version != version_of(stored_keys):
        return None
    return known


def _remember_exact(stored_keys: Tensor, keys: Tensor, values: Tensor) -> _Exact:
    number = id(stored_keys)

    def forget(reference: ReferenceType[Tensor]) -> None:
        # Another tensor may have the number by now.
        if (known := _exact.get(number)) is not None and known.stored is reference:
            del _exact[number]

    made = _exact[number] = _Exact(ref(stored_keys, forget), version_of(stored_keys), keys, values)
    return made


def _inverse_transformed(protected: list[Tensor], inverses: Tensor, means: Tensor) -> _Exact:
    """Keys and values of protected tokens in the model's coordinates; computed once per version of the stored ones."""
    stored_keys, stored_values = protected
    known = _known_exact(stored_keys)
    if known is not None:
        return known
    # Kept for later calls, in whatever mode.
    with torch.inference_mode(False), torch.no_grad():
        keys = stored_keys.float() @ inverses[0].transpose(-1, -2) + means[0][:, None]
        values = stored_values.float() @ inverses[1].transpose(-1, -2) + means[1][:, None]
    return _remember_exact(stored_keys, keys, values)


def prepare(codec: KVCodec, layers: Sequence[Packed]) -> None:
    """Computes what `attend_packed` needs of the protected tokens of all layers, in a few operations.

    In a graph that is being captured it is computed anew, as the graph will find other tokens when it is replayed.
    """
    stored = [protected["keys"] for protected in layers if "keys" in protected]
    # The layers of a model that is spread over several devices are prepared one by one.
    if len({keys.device for keys in stored}) != 1 or not can_run(codec):
        return
    capturing = stored[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not capturing and None not in map(_known_exact, stored):
        return
    made = []
    with torch.inference_mode(False), torch.no_grad():
        for kind, (inverse, mean) in zip(("keys", "values"), _inverse_maps(codec, stored[0].device), strict=True):
            stacked = torch.stack([protected[kind] for protected in layers])
            made.append(torch.matmul(stacked.float(), inverse).add_(mean))
    for stored_keys, keys, values in zip(stored, *made, strict=True):
        _remember_exact(stored_keys, keys, values)


@per_codec
def _inverse_maps(codec: KVCodec, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Inverse maps, transposed, [layers, 1, H, D, D], and means, [layers, 1, H, 1, D]; of keys and of values."""
    identity, zero = neutral_maps(codec.geometry, device)
    states = [codec.layer_state(layer_idx, device) for layer_idx in range(codec.geometry.num_layers)]
    key, value = (
        (
            torch.stack([state.get(f"{kind}_inverse", identity) for state in states]).transpose(-1, -2)[:, None],
            torch.stack([state.get(f"{kind}_mean", zero) for state in states])[:, None, :, None],
        )
        for kind in ("key", "value")
    )
    publish(device)
    return key, value


@per_codec
def _value_size(codec: KVCodec, stored: tuple[str, ...]) -> int:
    """Components of all value operands of a layer, rounded up to a power of two; the largest of all layers."""
    sizes = [
        sum(value_view(slab).spec.size for slab in codec.field_slabs(layer, "value") if slab.name in stored)
        for layer in range(codec.geometry.num_layers)
    ]
    return max(MMA_ROWS, next_power_of_two(max(sizes)))


@per_codec
def _layout(
    codec: KVCodec, layer_idx: int, stored: tuple[str, ...], device: torch.device, dtype: torch.dtype
) -> KernelLayout:
    """The layer's layout, with maps and tables in the dtypes that queries of `dtype` need."""
    layout = triton_layout(codec, layer_idx, stored, device, half=dtype != torch.float32)
    # Of one size in all layers, so that they share a kernel.
    padding = _value_size(codec, stored) - len(layout.value_middle)
    value_map = functional.pad(layout.value_map, (0, 0, 0, padding))
    layout = replace(layout, value_map=value_map, value_middle=functional.pad(layout.value_middle, (0, padding)))
    if dtype == torch.bfloat16:
        # Divided by a power of two, so that it fits half precision: the largest entry without its mantissa.
        largest = value_map.abs().amax(dim=(1, 2)).clamp_min(torch.finfo(torch.float32).tiny)
        size = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
        value_map = (value_map / size[:, None, None]).half()
        layout = replace(
            layout, query_map=layout.query_map.half(), value_map=value_map, value_scale=layout.value_scale * size
        )
    if dtype != torch.float32 and layout.key_table is not None and layout.value_table is not None:
        layout = replace(layout, key_table=layout.key_table.half(), value_table=layout.value_table.half())
    publish(device)
    return layout
