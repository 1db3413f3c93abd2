"""Random arguments of `extend_attention`, and its expected result: attention over the decoded context in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs import KVCodec, Packed, PackedContext
from esm_turbo.codecs.row_index import RowIndex, of_rows
from esm_turbo.config import TurboConfig
from tests.helpers.codec_samples import correlated, fitted, statistics_of

# Not the first layer, so that an off-by-one error in the layer shows.
LAYER = 1


@cache
def codec_of(preset: str, head_dim: int) -> KVCodec:
    """A preset's codec for two layers and two heads, fitted to random keys and values."""
    return fitted(TurboConfig.from_preset(preset), _statistics(head_dim))


@cache
def codec_with_gains(preset: str, head_dim: int) -> KVCodec:
    """The same of layers that look up positions, whose components are multiplied by gains of 1 to 2."""
    codec, generator = codec_of(preset, head_dim), torch.Generator().manual_seed(head_dim)
    gains = {f"{kind}_gains": 1 + torch.rand(2, head_dim, generator=generator) for kind in ("key", "value")}
    return type(codec)(codec.config, codec.geometry, codec.state | gains)


@cache
def _statistics(head_dim: int):
    rng = np.random.default_rng(head_dim)
    keys, values, queries = (correlated(rng, 300, head_dim) for _ in range(3))
    return statistics_of(keys, values, queries=queries)


@dataclass(frozen=True)
class Case:
    """Arguments of `extend_attention` except codec and layer, and everything that a row may see, decoded.

    Attributes:
        query: [B, H, n, D].
        keys: [B, H, n, D].
        values: [B, H, n, D].
        mask: bool [B, n] or None.
        context: of one layer.
        all_keys: of the context, protected and new, float32 [B, H, L + P + n, D].
        all_values: likewise.
        seen: which of them, bool [B, L + P + n].
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    context: PackedContext
    all_keys: Tensor
    all_values: Tensor
    seen: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, PackedContext]:
        return self.query, self.keys, self.values, self.mask, self.context

    def expected(self) -> Tensor:
        """Float64 [B, H, n, D]; zeros where nothing is seen."""
        scores = self.query.double() @ self.all_keys.double().transpose(2, 3)
        scores = scores.masked_fill(~self.seen[:, None, None], -math.inf)
        return scores.softmax(dim=-1).nan_to_num(0.0) @ self.all_values.double()

    def plain(self) -> Tensor:
        """PyTorch's attention over the decoded keys and values in the query's dtype."""
        dtype = self.query.dtype
        return torch.nn.functional.scaled_dot_product_attention(
            self.query,
            self.all_keys.to(dtype),
            self.all_values.to(dtype),
            self.seen[:, None, None].expand(-1, -1, self.query.shape[2], -1),
            scale=1.0,
        )


def make_case(
    codec: KVCodec,
    *,
    batch: int = 2,
    shared: bool = False,
    index: tuple[int, ...] | None = None,
    n: int = 3,
    columns: int = 70,
    lengths: tuple[int, ...] | None = None,
    slots: int = 0,
    masked: bool = False,
    without: tuple[str, ...] = (),
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random queries, new tokens and contexts.

    Args:
        codec: stores the contexts.
        batch: rows of the extension.
        shared: whether all rows share one context.
        index: context of each row, instead of `batch`; rows of a context follow each other. There are as many contexts
            as `lengths`.
        n: new tokens.
        columns: of the contexts.
        lengths: of the contexts; columns beyond them hold garbage. None for all columns.
        slots: protected tokens per context; if more than one, the last slot is unused.
        masked: hide some columns, protected tokens and new tokens, different ones in each row.
        without: names of packed tensors that were dropped.
        scale: of the queries.
        dtype: of the model.
        device: of all tensors.
        seed: of the random numbers.
    """
    geometry = codec.geometry
    heads, head_dim, contexts = geometry.num_heads, geometry.head_dim, 1 if shared else batch
    row_index = None
    if index is not None:
        assert lengths is not None
        batch, contexts, row_index = len(index), len(lengths), RowIndex(np.array(index, dtype=np.int64))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def hidden(rows: int, length: int) -> Tensor:
        return torch.rand(rows, length, generator=generator) < 0.3

    def as_projected(x: Tensor) -> Tensor:
        """[B, H, n, D] in a model's memory layout, contiguous as [B, n, H, D]."""
        return x.transpose(1, 2).contiguous().to(device, dtype).transpose(1, 2)

    query = as_projected(normal(batch, heads, n, head_dim) * (2 * scale / math.sqrt(head_dim)))
    keys, values = as_projected(normal(batch, heads, n, head_dim)), as_projected(normal(batch, heads, n, head_dim))

    past = [normal(contexts, heads, columns, head_dim) + 0.3 for _ in range(2)]
    transformed = codec.transform(LAYER, *past)
    packed = codec.quantize(LAYER, *transformed)
    length = torch.tensor(lengths or (columns,) * contexts)
    there = torch.arange(columns) < length[:, None]
    for tensor in packed.values():
        garbage = torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
        tensor.copy_(torch.where(there[:, None, :, None], tensor, garbage))
    packed = {name: tensor for name, tensor in packed.items() if name not in without}
    rows = codec.summarize(LAYER, *transformed, packed, there)

    protected: Packed = {}
    protected_columns = torch.zeros(contexts, slots, dtype=torch.int32)
    protected_mask = None
    seen = of_rows(there, row_index).expand(batch, -1)
    visible = None
    if masked:
        visible = ~hidden(batch, columns)
        seen = seen & visible
    special = [x[:, :, :0] for x in past]
    if slots:
        start = torch.zeros(contexts, slots, dtype=torch.int64)
        special = codec.transform(LAYER, *(normal(contexts, heads, slots, head_dim) for _ in range(2)), start)
        protected = {name: x.to(device, torch.bfloat16) for name, x in zip(("keys", "values"), special, strict=True)}
        special = codec.inverse_transform(LAYER, *(x.cpu().float() for x in protected.values()), start)
        # The first column of a context, then its last columns.
        protected_columns = torch.stack([(length - slot) % length for slot in range(slots)], dim=1).to(torch.int32)
        if slots > 1:
            protected_columns[:, -1] = -1
        protected_mask = of_rows(protected_columns >= 0, row_index).expand(batch, -1)
        if masked:
            protected_mask = protected_mask & ~hidden(batch, slots)
        is_protected = torch.arange(columns) == protected_columns[:, :, None]
        seen = seen & ~of_rows(is_protected.any(dim=1), row_index)
    mask = ~hidden(batch, n) if masked else None

    sides = [codec.decode(LAYER, packed | rows), special]
    sides = [[of_rows(x, row_index) for x in side] for side in sides] + [(keys.cpu().float(), values.cpu().float())]
    all_keys, all_values = (
        torch.cat([side[kind].expand(batch, -1, -1, -1) for side in sides], dim=2).to(device) for kind in (0, 1)
    )
    masks = [seen, torch.zeros(batch, 0).bool() if protected_mask is None else protected_mask]
    masks.append(torch.ones(batch, n).bool() if mask is None else mask)

    def on_device(tensors: Packed) -> Packed:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    context = PackedContext(
        on_device(packed),
        seen.to(device),
        protected,
        None if protected_mask is None else protected_mask.to(device),
        on_device(rows),
        length.to(device),
        protected_columns.to(device),
        None if visible is None else visible.to(device),
        index=row_index,
    )
    mask = None if mask is None else mask.to(device)
    return Case(query, keys, values, mask, context, all_keys, all_values, torch.cat(masks, dim=1).to(device))


def hiding_everything_from(case: Case, row: int) -> Case:
    """The case with everything hidden from one row."""
    batch, n = case.query.shape[0], case.query.shape[2]
    keep = torch.arange(batch, device=case.query.device) != row
    context = case.context
    mask = torch.ones(batch, n, device=keep.device).bool() if case.mask is None else case.mask
    visible = torch.ones_like(context.mask) if context.visible is None else context.visible
    context = replace(
        context,
        mask=context.mask & keep[:, None],
        visible=visible & keep[:, None],
        protected_mask=None if context.protected_mask is None else context.protected_mask & keep[:, None],
    )
    return replace(case, mask=mask & keep[:, None], context=context, seen=case.seen & keep[:, None])
