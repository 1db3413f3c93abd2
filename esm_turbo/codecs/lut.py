"""The TurboESM paper's codec: per-head look-up tables with sign correction (arXiv:2603.26110, section 3, algorithm 1).

A component x is stored as the index of the nearest of 2^bits levels (Lloyd-Max, section 3.3) and one bit s for the sign
of the residual (section 3.4, eq. 6 and 7):

    x_hat = level[index] + (2 s - 1) step,    step = mean |x - level[index]| over the calibration sample.

Index and sign share a field of bits + 1 bits, the sign on top; eight fields are packed as described in
docs/format.md, so that with three bits and a sign they fill one 32-bit word. Keys are rotated by the right singular
vectors of the post-RoPE keys (section 3.2); values are not rotated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.base import FieldSlab, KVCodec, Packed
from esm_turbo.codecs.fitting import batched
from esm_turbo.codecs.fitting.lloyd_max import lloyd_max
from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.codecs.fitting.threads import run_threads
from esm_turbo.codecs.fitting.transforms import svd_rotation
from esm_turbo.codecs.packing import check_head_dim, midpoints, pack_codes, quantize, unpack_codes
from esm_turbo.config import TurboConfig

# Kernels, and the lookup of byte pairs, read tables of 16 entries: fields of four bits.
_KERNEL_FIELDS = 16


class LutCodec(KVCodec):
    """Look-up tables per head for keys and for values, with sign correction."""

    hides_nan = hides_appended_nan = True

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """See `KVCodec.fit`.

        Raises:
            ValueError: `head_dim` is not a multiple of 8, or the sample holds no token to quantise.
        """
        check_head_dim(statistics.geometry.head_dim)
        moments, sample = statistics.select(config.protect_special_tokens)
        key_map, key_inverse = svd_rotation(moments.keys.second_moment)
        keys, values, rotation = (
            torch.from_numpy(one).to(statistics.device).double() for one in (sample.keys, sample.values, key_map)
        )
        keys = keys @ rotation.mT
        key_levels, value_levels = _fit_levels(keys, config.bits), _fit_levels(values, config.bits)
        state = {
            "key_map": key_map,
            "key_inverse": key_inverse,
            "key_levels": key_levels,
            "key_step": _mean_absolute_residual(keys, key_levels),
            "value_levels": value_levels,
            "value_step": _mean_absolute_residual(values, value_levels),
        }
        return {name: torch.as_tensor(array).float().cpu() for name, array in state.items()}

    def prepare(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for kind in ("key", "value"):
            levels = tensors[f"{kind}_levels"]
            tensors[f"{kind}_boundaries"] = midpoints(levels)
            step = tensors[f"{kind}_step"][:, None]
            fields = torch.cat([levels - step, levels + step], dim=1)
            tensors[f"{kind}_fields"] = fields
            if fields.shape[1] == _KERNEL_FIELDS:
                tensors[f"{kind}_pairs"] = _pair_table(fields)
        return tensors

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        state, bits = self.layer_state(layer_idx, x.device), self.config.bits
        codes = quantize(x, state[f"{kind}_boundaries"])
        residual = x - _look_up(state[f"{kind}_levels"], codes)
        return {f"{kind}s": pack_codes(codes | (residual > 0).to(torch.uint8) << bits, bits + 1)}

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        codes = packed[f"{kind}s"]
        state = self.layer_state(layer_idx, codes.device)
        if f"{kind}_pairs" in state:
            return _look_up(state[f"{kind}_pairs"], codes).view(torch.float32)
        fields = state[f"{kind}_fields"]
        return _look_up(fields, unpack_codes(codes, (fields.shape[1] - 1).bit_length()))

    def field_slabs(self, layer_idx: int, kind: str) -> list[FieldSlab]:
        if 2 * self.state[f"{kind}_levels"].shape[-1] != _KERNEL_FIELDS:
            return []
        every = tuple(range(self.geometry.head_dim))
        return [FieldSlab(f"{kind}s", 4, every, (1.0,) * len(every), f"{kind}_fields")]


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Entries of table [H, entries] at codes [B, H, L, n], with one gather per head."""
    batch_size, num_heads = codes.shape[:2]
    table = table.expand(batch_size, -1, -1)
    # The cast copies a slice of a cache to contiguous memory: reshaping first would copy it twice.
    index = codes.long().reshape(batch_size, num_heads, -1)
    return table.gather(2, index).view(codes.shape)


def _pair_table(fields: Tensor) -> Tensor:
    """Decoded pairs for every byte of two 4-bit fields: two float32 viewed as one int64, [H, 256].

    One lookup fetches two components, which halves the most expensive part of decoding on a CPU.
    """
    byte = torch.arange(256, device=fields.device)
    pairs = torch.stack([fields[:, byte & 15], fields[:, byte >> 4]], dim=-1)
    return pairs.view(torch.int64).squeeze(-1)


def _fit_levels(samples: Tensor, bits: int) -> Tensor:
    """Lloyd-Max levels per head, over all its components, [layers, heads, 2^bits]."""
    rows = samples.flatten(2).flatten(0, 1)
    if samples.device.type == "cpu":
        levels = torch.from_numpy(np.stack(run_threads(lambda row: lloyd_max(row, 2**bits), rows.numpy())))
    else:
        levels = batched.lloyd_max(rows, 2**bits)
    found: Tensor = levels.unflatten(0, samples.shape[:2])
    return found


def _mean_absolute_residual(samples: Tensor, levels: Tensor) -> Tensor:
    """Mean |x - nearest level| per head, [layers, heads]."""
    residuals = []
    for x, grid in zip(samples.flatten(2), levels, strict=True):
        nearest = torch.searchsorted(0.5 * (grid[:, 1:] + grid[:, :-1]), x)
        residuals.append((x - grid.gather(1, nearest)).abs().mean(1))
    return torch.stack(residuals)
