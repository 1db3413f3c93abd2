"""Slow, plain references of packing and of attention to decoded contexts, with the same names and arguments.

They are written to be read: Python integers, loops over groups and rows, float64 where that makes a comparison exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.packing import GROUP_SIZE, check_boundaries, check_codes, check_packed


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Reference of `esm_turbo.codecs.packing.pack_codes`: each group is one integer, written as little-endian bytes."""
    check_codes(codes, bits)
    packed = bytearray()
    for group in codes.reshape(codes.numel() // GROUP_SIZE, GROUP_SIZE).tolist():
        word = sum((code % 2**bits) << (bits * j) for j, code in enumerate(group))
        packed += word.to_bytes(bits, "little")
    shape = (*codes.shape[:-1], codes.shape[-1] // GROUP_SIZE * bits)
    return torch.tensor(list(packed), dtype=torch.uint8, device=codes.device).reshape(shape)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Reference of `esm_turbo.codecs.packing.unpack_codes`: reads each group back as one Python integer."""
    check_packed(packed, bits)
    codes: list[int] = []
    for group in packed.reshape(packed.numel() // bits, bits).tolist():
        word = int.from_bytes(bytes(group), "little")
        codes += [(word >> (bits * j)) % 2**bits for j in range(GROUP_SIZE)]
    shape = (*packed.shape[:-1], packed.shape[-1] // bits * GROUP_SIZE)
    return torch.tensor(codes, dtype=torch.uint8, device=packed.device).reshape(shape)


def quantize(x: Tensor, boundaries: Tensor) -> Tensor:
    """Reference of `esm_turbo.codecs.packing.quantize`: `numpy.searchsorted`, one element at a time."""
    check_boundaries(x, boundaries)
    values = x.detach().cpu().to(torch.float64).numpy()
    thresholds = boundaries.detach().cpu().to(torch.float64).numpy()
    if thresholds.ndim == 1:
        thresholds = np.broadcast_to(thresholds, (*x.shape, thresholds.shape[-1]))
    elif thresholds.ndim == 2:
        thresholds = np.broadcast_to(thresholds[:, None, None, :], (*x.shape, thresholds.shape[-1]))
    else:
        thresholds = np.broadcast_to(thresholds[:, None, :, :], (*x.shape, thresholds.shape[-1]))
    codes = np.zeros(values.shape, dtype=np.uint8)
    for index in np.ndindex(values.shape):
        if not np.isnan(values[index]):
            codes[index] = np.searchsorted(thresholds[index], values[index], side="left")
    return torch.from_numpy(codes).to(x.device)


def attend_shared(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    past_keys: Tensor,
    past_values: Tensor,
    lengths: Tensor,
    visible: Tensor | None,
    tiles: Tensor | None,
) -> Tensor:
    """Reference of `decoded_attention.attend_shared`: one softmax for each query."""
    batch_size, heads, n, _ = query.shape
    queries = batch_size * n // len(past_keys)
    table = [[context, context * queries, (context + 1) * queries] for context in range(len(past_keys))]
    if tiles is not None:
        table = tiles.tolist()
    output = torch.zeros(query.shape)
    for context, first, end in table:
        for number in range(first, end):
            row, token = divmod(number, n)
            seen = torch.ones(n, dtype=torch.bool) if mask is None else mask[row]
            columns = torch.arange(past_keys.shape[2]) < lengths[context]
            if visible is not None:
                columns = columns & visible[row % len(visible)]
            for head in range(heads):
                k = torch.cat([past_keys[context, head][columns], keys[row, head][seen]]).float()
                v = torch.cat([past_values[context, head][columns], values[row, head][seen]]).float()
                if len(k):
                    output[row, head, token] = torch.softmax(k @ query[row, head, token].float(), dim=0) @ v
    return output.to(query.dtype)
