"""The TurboESM paper's codec: per-head look-up tables with sign correction (arXiv:2603.26110, sections 3.1 to 3.4).

A component x is stored as the index of the nearest of 2^bits levels (Lloyd-Max, section 3.3) and, with sign
correction, one bit s for the sign of the residual (section 3.4, eq. 6 and 7):

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
from esm_turbo.codecs.fitting import transforms
from esm_turbo.codecs.fitting.lloyd_max import lloyd_max
from esm_turbo.codecs.fitting.statistics import Array, KVStatistics, Moments
from esm_turbo.codecs.fitting.threads import run_threads
from esm_turbo.codecs.packing import check_head_dim, midpoints, pack_codes, quantize, unpack_codes
from esm_turbo.config import TurboConfig

# Kernels, and the lookup of byte pairs, read tables of 16 entries: fields of four bits.
_KERNEL_FIELDS = 16


class LutCodec(KVCodec):
    """Look-up tables per head for keys and for values, with sign correction."""

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """See `KVCodec.fit`.

        Raises:
            ValueError: `head_dim` is not a multiple of 8, or the sample holds no token to quantise.
        """
        check_head_dim(statistics.geometry.head_dim)
        moments, sample = statistics.select(config.protect_special_tokens)
        key_map, key_inverse = _fit_transform(config.key_transform, moments.keys, config)
        value_map, value_inverse = _fit_transform(config.value_transform, moments.values, config)
        keys = np.einsum("lhij,lhtj->lhti", key_map, sample.keys, optimize=True)
        values = np.einsum("lhij,lhtj->lhti", value_map, sample.values, optimize=True)
        if config.shared_codebook:
            both = np.concatenate([keys, values], axis=2)
            key_levels = value_levels = _fit_levels(both, config.bits)
        else:
            key_levels, value_levels = _fit_levels(keys, config.bits), _fit_levels(values, config.bits)
        state = {
            "key_map": key_map,
            "key_inverse": key_inverse,
            "key_levels": key_levels,
            "key_step": _mean_absolute_residual(keys, key_levels),
            "value_levels": value_levels,
            "value_step": _mean_absolute_residual(values, value_levels),
        }
        if config.value_transform != "identity" or config.standardize:
            state |= {"value_map": value_map, "value_inverse": value_inverse}
        return {name: torch.from_numpy(array.astype(np.float32)) for name, array in state.items()}

    def _has_signs(self, kind: str) -> bool:
        return self.config.sign_correction in ("keys_and_values", f"{kind}s")

    def prepare(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for kind in ("key", "value"):
            levels = tensors[f"{kind}_levels"]
            tensors[f"{kind}_boundaries"] = midpoints(levels)
            step = tensors[f"{kind}_step"][:, None]
            fields = torch.cat([levels - step, levels + step], dim=1) if self._has_signs(kind) else levels
            tensors[f"{kind}_fields"] = fields
            if fields.shape[1] == _KERNEL_FIELDS:
                tensors[f"{kind}_pairs"] = _pair_table(fields)
        return tensors

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        state, bits = self.layer_state(layer_idx, x.device), self.config.bits
        codes = quantize(x, state[f"{kind}_boundaries"])
        if self._has_signs(kind):
            residual = x - _look_up(state[f"{kind}_levels"], codes)
            codes, bits = codes | (residual > 0).to(torch.uint8) << bits, bits + 1
        return {f"{kind}s": pack_codes(codes, bits)}

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        codes = packed[f"{kind}s"]
        state = self.layer_state(layer_idx, codes.device)
        if f"{kind}_pairs" in state:
            return _look_up(state[f"{kind}_pairs"], codes).view(torch.float32)
        fields = state[f"{kind}_fields"]
        return _look_up(fields, unpack_codes(codes, (fields.shape[1] - 1).bit_length()))

    def field_slabs(self, layer_idx: int, kind: str) -> list[FieldSlab]:
        fields = self.state[f"{kind}_levels"].shape[-1] * (2 if self._has_signs(kind) else 1)
        if fields != _KERNEL_FIELDS:
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


def _fit_transform(kind: str, moments: Moments, config: TurboConfig) -> tuple[Array, Array]:
    stack, head_dim = moments.mean.shape[:-1], moments.mean.shape[-1]
    if kind == "svd":
        maps = transforms.svd_rotation(moments.second_moment)
    elif kind == "hadamard":
        maps = transforms.random_hadamard(head_dim, config.seed, stack)
    else:
        maps = transforms.identity((*stack, head_dim))
    return transforms.standardized(maps, moments.second_moment) if config.standardize else maps


def _fit_levels(samples: Array, bits: int) -> Array:
    """Lloyd-Max levels per head, over all its components, [layers, heads, 2^bits]."""
    layers, heads = samples.shape[:2]
    levels = run_threads(lambda head: lloyd_max(samples[head], 2**bits), np.ndindex(layers, heads))
    return np.reshape(levels, (layers, heads, -1))


def _mean_absolute_residual(samples: Array, levels: Array) -> Array:
    """Mean |x - nearest level| per head, [layers, heads]."""

    def of_head(head: tuple[int, ...]) -> float:
        x, grid = samples[head], levels[head]
        return float(np.abs(x - grid[np.searchsorted((grid[1:] + grid[:-1]) / 2, x)]).mean())

    shape = levels.shape[:2]
    return np.reshape(run_threads(of_head, np.ndindex(*shape)), shape)
