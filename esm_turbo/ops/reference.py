"""Slow, plain references of the fast paths, with the same names and arguments.

They are written to be read: Python integers, loops over rows, float64 where that makes a comparison exact. They are the
backend `reference`, with which tests compare the fast paths. Nothing here is meant for production.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from esm_turbo.codecs import KVCodec, Packed, PackedContext

if TYPE_CHECKING:
    from esm_turbo.ops.float8 import Quantized

__all__ = ["encode", "extend_attention", "float8_linear", "gelu", "rotate"]


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
    """Reference of `torch_ops.encode`: row by row, tokens selected by lists of integers."""
    encoded: list[tuple[Packed, Packed, Packed]] = []
    for row in range(len(keys)):
        tokens = list(range(keys.shape[2])) if order is None else order[row].tolist()
        first = 0 if start is None else int(start[row])
        kept = len(tokens) if counts is None else int(counts[row])
        slots = [] if protected is None else protected[row].tolist()
        offsets = torch.tensor([range(first, first + len(tokens))])
        mapped = codec.transform(layer_idx, keys[[row]][:, :, tokens], values[[row]][:, :, tokens], offsets)
        packed = codec.quantize(layer_idx, *mapped)
        summary: Packed = {}
        if summarize:
            read = torch.tensor([[step < kept and step not in slots for step in range(len(tokens))]])
            summary = codec.summarize(layer_idx, *mapped, packed, read)
        unquantised: Packed = {}
        if protected is not None:
            chosen = [tokens[max(slot, 0)] for slot in slots]
            zero = torch.zeros(1, len(chosen), dtype=torch.int64)
            special = codec.transform(layer_idx, keys[[row]][:, :, chosen], values[[row]][:, :, chosen], zero)
            unquantised = {"keys": special[0].to(torch.bfloat16), "values": special[1].to(torch.bfloat16)}
        encoded.append((packed, unquantised, summary))
    packed, unquantised, summary = (
        {name: _cat([tensors[name] for tensors in rows]) for name in rows[0]} for rows in zip(*encoded, strict=True)
    )
    return packed, unquantised, summary


def _cat(rows: list[Tensor]) -> Tensor:
    """Rows in one tensor; what is stored per row may be longer for a longer row, in the fourth dimension."""
    longest = max(row.shape[3] for row in rows)
    return torch.cat([functional.pad(row, [0, 0] * (row.dim() - 4) + [0, longest - row.shape[3]]) for row in rows])


def extend_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    context: PackedContext,
    codec: KVCodec,
    layer_idx: int,
) -> Tensor:
    """Reference of `torch_ops.extend_attention`, with the whole context decoded at once.

    Cached keys and values are mapped back to the model's coordinates, concatenated with the new ones, and attended to
    with one softmax.
    """
    past_keys, past_values = codec.decode(layer_idx, context.packed | context.rows)
    batch_size, columns = query.shape[0], past_keys.shape[2]
    visible = torch.ones(batch_size, columns, dtype=torch.bool) if context.mask is None else context.mask
    parts = [(past_keys, past_values, visible)]
    if context.protected:
        assert context.protected_mask is not None
        zero = torch.zeros(context.protected["keys"].shape[::2], dtype=torch.int64)
        protected = codec.inverse_transform(layer_idx, context.protected["keys"], context.protected["values"], zero)
        parts.append((*protected, context.protected_mask))
    new = torch.ones(batch_size, keys.shape[2], dtype=torch.bool) if mask is None else mask
    parts.append((keys.float(), values.float(), new))
    output = torch.zeros(query.shape, dtype=torch.float32)
    for row in range(batch_size):
        for head in range(query.shape[1]):
            # One cached row may serve the whole batch, or rows name theirs; the new tokens are each row's own.
            named = row if context.index is None else int(context.index.contexts[row])
            own = [named % len(past_keys)] * (len(parts) - 1) + [row]
            k = torch.cat([part[0][i, head][part[2][row]] for i, part in zip(own, parts, strict=True)])
            v = torch.cat([part[1][i, head][part[2][row]] for i, part in zip(own, parts, strict=True)])
            if len(k):
                scores = query[row, head].float() @ k.T
                output[row, head] = torch.softmax(scores, dim=-1) @ v
    return output.to(query.dtype)


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Reference of `torch_ops.rotate`: the halves of a head form complex numbers, which are multiplied."""
    half = query.shape[3] // 2
    angle = torch.complex(cos[..., :half].double(), sin[..., :half].double())[:, None]
    rotated = []
    for x, factor in ((query, scale), (keys, 1.0)):
        low, high = x.double().mul(factor).chunk(2, dim=-1)
        product = torch.complex(low, high) * angle
        rotated.append(torch.cat([product.real, product.imag], dim=-1).to(x.dtype))
    return rotated[0], rotated[1]


def gelu(x: Tensor) -> Tensor:
    """Reference of `torch_ops.gelu`: x times the normal distribution's probability below it."""
    probability: Tensor = torch.special.ndtr(x.double())
    return (x.double() * probability).to(x.dtype)


def float8_linear(x: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Reference of `float8.float8_linear`: the product of the decoded numbers in float32."""
    decoded = functional.linear(x.codes.float() * x.scales, weight.float() * scales)
    return (decoded if bias is None else decoded + bias.float()).bfloat16()
