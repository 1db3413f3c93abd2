"""Attention over packed contexts by the Triton kernels: the path of CUDA. Imports triton only when it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from esm_turbo.codecs import KVCodec, Packed, PackedContext
from esm_turbo.files.fingerprint import version_of
from esm_turbo.ops import torch_ops
from esm_turbo.ops.triton_layer import gelu, like_tokens, overlaps, rotate, settle
from esm_turbo.ops.triton_layout import KernelLayout, block_angles, key_view, power_of_two, triton_layout, value_view

__all__ = ["extend_attention", "gelu", "rotate"]

# The numbers of `SlabView.spec`.
_Spec = tuple[int, int, int, int, int, bool, int]

# Of either of a multiprocessor's four parts, which do not share them; a thread may have 255.
_REGISTERS = 16384
_MOST_REGISTERS = 256
# What a device without multiprocessors counts as.
_MULTIPROCESSORS = 132
_MOST_PARTS = 64
# From so many parts on more warps join them.
_MANY_PARTS = 32
# Rows of a tensor core's operand.
_ROWS = 16
_SMALL_HEAD = 64
# Components of all operands of a token: the query's maps to them lie in shared memory.
_MOST_PLACES = 256


@dataclass(frozen=True)
class Tuning:
    """How the kernel that reads contexts is compiled.

    Attributes:
        tile: tokens of a tile: a block of 64 columns, or a part of it.
        asks: for how many tiles at a time the second-level cache is asked ahead of time, where groups and programs have
            several; 0 for none.
        warps: of a program that reads contexts.
        stages: of its software pipeline.
        merge_warps: of a program that joins few parts; twice as many join many.
        merge_programs: that there are at least before rows of several contexts share one.
        registers: the most that a thread may have, of kernels in half precision without tables, for heads of up to 64
            and up to eight queries; others leave it to the compiler. Fewer let more programs run side by side.
        programs: among how many the contexts' blocks are shared out; None for as many as run side by side.
    """

    tile: int = 64
    asks: int = 2
    warps: int = 1
    stages: int = 3
    merge_warps: int = 4
    merge_programs: int = 132
    registers: int = 168
    programs: int | None = None


DEFAULT_TUNING = Tuning()


def can_run(codec: KVCodec) -> bool:
    """Whether there are kernels for a codec: its components are fields in slabs, not too many of them."""
    known = _runnable.get(codec)
    if known is None:
        known = _runnable[codec] = _can_run(codec)
    return known


def _can_run(codec: KVCodec) -> bool:
    for layer_idx in range(codec.geometry.num_layers):
        for kind, view in (("key", key_view), ("value", value_view)):
            found = codec.field_slabs(layer_idx, kind)
            if not found or sum(view(slab).size for slab in found) > _MOST_PLACES:
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
    """See `torch_ops.extend_attention`, which also does what there are no kernels for (`can_run`)."""
    if not can_run(codec):
        return torch_ops.extend_attention(query, keys, values, mask, context, codec, layer_idx)
    layout = _layout(codec, layer_idx, context, query)
    some = next(iter(context.packed.values()))
    rows, columns = some.shape[0], some.shape[2]
    lengths, protected_columns, visible = context.lengths, context.protected_columns, context.visible
    if lengths is None:
        lengths = torch.full((rows,), columns, dtype=torch.int64, device=query.device)
        protected_columns, visible = None, context.mask
    if protected_columns is None:
        protected_columns = torch.empty(rows, 0, dtype=torch.int32, device=query.device)
    slots = context.protected["keys"].shape[2] if context.protected else 0
    protected = [context.protected[name] for name in ("keys", "values") if slots]
    residuals = [context.rows[f"{kind}_residual"] for kind in ("key", "value") if f"{kind}_residual" in context.rows]
    tables = [table for table in (layout.key_table, layout.value_table) if table is not None]
    output: Tensor = torch.ops.esm_turbo.attend_packed(
        query,
        keys,
        values,
        mask,
        [view.of(context.packed) for view in layout.keys],
        [view.of(context.packed) for view in layout.values],
        layout.tensors,
        tables,
        residuals,
        block_angles(codec, layer_idx, columns, query.device),
        lengths,
        protected_columns,
        protected,
        context.protected_mask if protected else None,
        visible,
        [number for view in layout.keys for number in view.spec],
        [number for view in layout.values for number in view.spec],
    )
    return output


@torch.library.custom_op("esm_turbo::attend_packed", mutates_args=())
def attend_packed(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    key_slabs: list[Tensor],
    value_slabs: list[Tensor],
    layout: list[Tensor],
    tables: list[Tensor],
    residuals: list[Tensor],
    angles: Tensor | None,
    lengths: Tensor,
    protected_columns: Tensor,
    protected: list[Tensor],
    protected_mask: Tensor | None,
    visible: Tensor | None,
    key_spec: list[int],
    value_spec: list[int],
) -> Tensor:
    """Attention of new tokens to a packed context and to each other; two launches.

    Args:
        query: of the new tokens, after RoPE and scaling, [B, H, n, D].
        keys: of the new tokens, after RoPE, [B, H, n, D].
        values: of the new tokens, [B, H, n, D].
        mask: which new tokens are seen, bool [B, n]; None for all.
        key_slabs: [C, H, L, elements] each, see `SlabView`.
        value_slabs: likewise.
        layout: `KernelLayout.tensors`.
        tables: of keys and of values, [H, 16] each, or empty; float32, or float16 for queries of half precision.
        residuals: of keys and of values, [C, H, 1, D] each, or empty.
        angles: cosine and sine of every block's first column, [blocks, 2, D / 2]; None for keys without blocks.
        lengths: of the contexts, [C].
        protected_columns: that are not read from slabs, int32 [C, P], -1 for none.
        protected: keys and values of protected tokens as they are stored, [C, H, P, D] each, or empty.
        protected_mask: which of them a row sees, bool [B, P]; None for all.
        visible: which columns a row sees, bool [B, L]; None for all.
        key_spec: of all key slabs, the numbers of `SlabView.spec`.
        value_spec: likewise.

    Returns:
        [B, H, n, D], in the query's dtype.
    """
    return _attend(
        query, keys, values, mask, key_slabs, value_slabs, layout, tables, residuals, angles, lengths,
        protected_columns, protected, protected_mask, visible, _specs(key_spec), _specs(value_spec), DEFAULT_TUNING,
    )  # fmt: skip


@attend_packed.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return like_tokens(query)


def _specs(numbers: Sequence[int]) -> tuple[_Spec, ...]:
    rows = (numbers[start : start + 7] for start in range(0, len(numbers), 7))
    return tuple((*row[:5], bool(row[5]), row[6]) for row in rows)  # type: ignore[misc]


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    key_slabs: list[Tensor],
    value_slabs: list[Tensor],
    layout: list[Tensor],
    tables: list[Tensor],
    residuals: list[Tensor],
    angles: Tensor | None,
    lengths: Tensor,
    protected_columns: Tensor,
    protected: list[Tensor],
    protected_mask: Tensor | None,
    visible: Tensor | None,
    key_specs: tuple[_Spec, ...],
    value_specs: tuple[_Spec, ...],
    tuning: Tuning,
) -> Tensor:
    import triton.language as tl

    from esm_turbo.ops.kernels.attention import attend_context
    from esm_turbo.ops.kernels.merge import merge

    batch_size, heads, n, head_dim = query.shape
    contexts, columns = key_slabs[0].shape[0], key_slabs[0].shape[2]
    _check(query, keys, values, contexts, mask, visible, protected_mask)
    shared = contexts != batch_size
    rows = batch_size * n if shared else n
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values))
    query_map, query_scale, corrections, value_map, value_mean, means, inverses = layout
    half = query.dtype in (torch.float16, torch.bfloat16)
    # A tensor core cuts float32 off to 11 bits, which bfloat16 alone hides; three products are nearly exact.
    precision = "tf32" if query.dtype == torch.bfloat16 else "tf32x3"
    operand_rows = 8 if rows <= 8 else _ROWS
    queries = min(operand_rows, power_of_two(rows))
    row_tiles = -(-rows // queries)
    blocks, items = max(1, -(-columns // _BLOCK)), contexts * heads * row_tiles
    registers, limits = _MOST_REGISTERS, {}
    if half and head_dim <= _SMALL_HEAD and operand_rows < _ROWS and not tables:
        registers = limits["maxnreg"] = tuning.registers
    share = _share(items, blocks, tuning.programs or _side_by_side(query.device, tuning.warps, registers))
    most_parts = _most_parts(blocks, share)
    value_size = value_map.shape[1]
    count = contexts * heads * most_parts * rows
    scratch = torch.empty(count * (value_size + 2), dtype=torch.float32, device=query.device)
    partial, highest, total = scratch[: count * value_size], scratch[count * value_size : -count], scratch[-count:]
    key_table, value_table = tables or (query_scale, query_scale)
    key_residual, value_residual = residuals or (None, None)
    visible = None if visible is None else visible.expand(batch_size, -1).contiguous().view(torch.uint8)
    mask = None if mask is None else mask.expand(batch_size, -1).contiguous().view(torch.uint8)
    if protected_mask is not None:
        protected_mask = protected_mask.expand(batch_size, -1).contiguous().view(torch.uint8)
    protected_keys, protected_values = _unmapped(protected, inverses, means) if protected else (None, None)
    slots = protected_keys.shape[2] if protected_keys is not None else 0
    rotated = angles is not None
    overlap = overlaps(query.device)
    key_size = query_map.shape[2]
    attend_context[(-(-items * blocks // share),)](
        query,
        query_map,
        query_scale,
        corrections,
        means[0],
        key_residual,
        query_scale if angles is None else angles,
        tuple(key_slabs),
        tuple(value_slabs),
        key_table,
        value_table,
        lengths,
        protected_columns,
        visible,
        partial,
        highest,
        total,
        *query.stride()[:3],
        columns,
        columns,
        n,
        rows,
        heads,
        items,
        share,
        most_parts,
        HEAD_DIM=head_dim,
        HALF=query_map.shape[3],
        KEYS=key_specs,
        VALUES=value_specs,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        QUERIES=queries,
        ROWS=operand_rows,
        SLOTS=protected_columns.shape[1],
        SHARED=shared,
        ROTATED=rotated,
        ASKS=tuning.asks if queries < operand_rows and share > 1 else 0,
        T=tuning.tile,
        SHORT=columns < tuning.tile,
        BLOCK_TILES=_BLOCK // tuning.tile,
        DTYPE=tl.float16 if half else tl.float32,
        PRECISION=precision,
        ASM=not _interpreted(),
        OVERLAP=overlap,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        launch_pdl=overlap,
        **limits,
    )
    output = like_tokens(query)
    # Few new tokens of many rows share a tile, and with it the map of the output.
    flat = max(1, min(_ROWS // (n + slots), batch_size * heads // tuning.merge_programs)) if n < _ROWS else 0
    merged_rows = power_of_two(flat * n) if flat else _ROWS
    grid = (-(-batch_size // flat), heads, 1) if flat else (-(-n // _ROWS), heads, batch_size)
    merge[grid](
        query,
        keys,
        values,
        mask,
        protected_keys,
        protected_values,
        protected_mask,
        partial,
        highest,
        total,
        value_map,
        value_mean,
        value_residual,
        output,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        batch_size,
        n,
        rows,
        slots,
        blocks,
        share,
        most_parts,
        HEAD_DIM=head_dim,
        SIZE=max(_ROWS, power_of_two(head_dim)),
        VALUE_SIZE=value_size,
        VALUE_PLACES=max(_ROWS, power_of_two(value_size)),
        QUERIES=queries,
        ROWS=merged_rows,
        ROUNDS=power_of_two(-(-most_parts * merged_rows // _ROWS)),
        SHARED=shared,
        FLAT=flat,
        PRECISION=precision,
        OVERLAP=overlap,
        num_warps=tuning.merge_warps * (2 if most_parts >= _MANY_PARTS else 1),
        launch_pdl=overlap,
    )
    return output


def _check(query: Tensor, keys: Tensor, values: Tensor, contexts: int, *masks: Tensor | None) -> None:
    """Raises for what the kernels would read as something else."""
    if not query.shape == keys.shape == values.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (query, keys, values))
        raise ValueError(f"queries, keys and values must have one shape, got {shapes}")
    if contexts not in (1, query.shape[0]):
        raise ValueError(f"{query.shape[0]} rows need as many contexts, or one for all of them; got {contexts}")
    if any(mask is not None and mask.dtype != torch.bool for mask in masks):
        raise ValueError("masks must be boolean")


def _side_by_side(device: torch.device, warps: int, registers: int) -> int:
    """How many programs a device runs at a time, if a thread has so many registers."""
    multiprocessors = _MULTIPROCESSORS
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * 4 * (_REGISTERS // (32 * registers)) // warps


def _share(items: int, blocks: int, programs: int) -> int:
    """How many blocks a program takes, so that all do the same; it depends on shapes alone.

    Args:
        items: tiles of rows, of all heads and contexts.
        blocks: of each.
        programs: among which they are shared out.
    """
    share = max(1, -(-items * blocks // programs))
    while _most_parts(blocks, share) > _MOST_PARTS:
        share += 1
    return share


def _most_parts(blocks: int, share: int) -> int:
    """Of how many programs' blocks an item can consist, wherever it begins."""
    if blocks % share == 0 or share % blocks == 0:
        return -(-blocks // share)
    return -(-(blocks - 1) // share) + 1


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


_BLOCK = 64
_runnable: WeakKeyDictionary[KVCodec, bool] = WeakKeyDictionary()
_layouts: WeakKeyDictionary[KVCodec, dict[Any, KernelLayout]] = WeakKeyDictionary()
# By the tensor of stored keys: its version, and what was made of it and of the values.
_protected: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _unmapped(protected: list[Tensor], inverses: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of protected tokens in the model's coordinates; made once for what a cache holds."""
    keys, values = protected
    version, made = _protected.get(keys, (None, None))
    if version != version_of(keys):
        # What is kept is written into later, in whatever mode.
        with torch.inference_mode(False), torch.no_grad():
            made = (
                keys.float() @ inverses[0].transpose(-1, -2) + means[0][:, None],
                values.float() @ inverses[1].transpose(-1, -2) + means[1][:, None],
            )
        _protected[keys] = (version_of(keys), made)
    return made  # type: ignore[no-any-return]


def refresh_protected(codec: KVCodec, layers: Sequence[Packed]) -> None:
    """Brings up to date, in place, what graphs read that were captured before `layers` were written into.

    Args:
        codec: of the cache.
        layers: each layer's protected tokens.
    """
    for layer_idx, protected in enumerate(layers):
        keys = protected.get("keys")
        if keys is not None and keys in _protected:
            here = torch.zeros(len(keys), keys.shape[2], dtype=torch.int64, device=keys.device)
            made = _protected[keys][1]
            now = codec.inverse_transform(layer_idx, keys, protected["values"], here)
            for held, new in zip(made, now, strict=True):
                held.copy_(new)
            _protected[keys] = (version_of(keys), made)


def _layout(codec: KVCodec, layer_idx: int, context: PackedContext, query: Tensor) -> KernelLayout:
    """The layer's layout, made once."""
    stored, dtype = tuple(context.packed), query.dtype
    made = _layouts.setdefault(codec, {})
    key = (layer_idx, stored, query.device, dtype)
    if key not in made:
        layout = triton_layout(codec, layer_idx, stored, query.device)
        if dtype == torch.bfloat16:
            layout = replace(layout, query_map=layout.query_map.half())
        if dtype != torch.float32 and layout.key_table is not None and layout.value_table is not None:
            layout = replace(layout, key_table=layout.key_table.half(), value_table=layout.value_table.half())
        made[key] = layout
        settle(query.device)
    return made[key]
