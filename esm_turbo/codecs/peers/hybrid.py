"""TurboQuant with two widths, as in the mode TQ35 of aither-kvcache: more bits for channels of higher variance.

The channels of a head are sorted by their mean square on the calibration set, as by that package's `calibrate`, which
its vLLM backend does not call. The first half and the rest are coded separately: norm, random rotation, Lloyd-Max
codebook, and one bit for the signs of the residual after a second rotation: an orthogonal sign sketch of unbiased gain,
see `jl`; of n channels, the package's is sqrt(n) times smaller. With `bits` = 4 the first half has 3 + 1 bits and the
rest 2 + 1, 3.5 on average; with 3 they have 2 + 1 and 1 + 1, where the package's TQ25 divides the channels 1 to 3. Each
half stores two norms in bfloat16.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.base import KVCodec, Packed
from esm_turbo.codecs.fitting import transforms
from esm_turbo.codecs.fitting.statistics import Array, KVStatistics, Moments
from esm_turbo.codecs.packing import GROUP_SIZE, midpoints, pack_codes, quantize, unpack_codes
from esm_turbo.codecs.peers.data_free import check_options, every_layer, split_norm
from esm_turbo.codecs.peers.jl import orthogonal_gain, sketch, unsketch
from esm_turbo.codecs.peers.sphere import sphere_levels
from esm_turbo.config import Geometry, TurboConfig


class HybridCodec(KVCodec):
    """Two groups of channels with different widths."""

    @classmethod
    def fit(cls, config: TurboConfig, statistics: KVStatistics) -> dict[str, Tensor]:
        """See `KVCodec.fit`.

        Raises:
            ValueError: `bits` is neither 3 nor 4, or `head_dim` is below 16 or not a multiple of 8.
        """
        geometry = statistics.geometry
        check_options(config, geometry, (3, 4))
        if geometry.head_dim < 2 * GROUP_SIZE:
            raise ValueError(f"both groups need {GROUP_SIZE} channels: `head_dim` must be at least 16")
        sizes = _group_sizes(geometry)
        moments, _ = statistics.select(config.protect_special_tokens)
        key_map, value_map = (_sorting_rotation(m, sizes, config.seed) for m in (moments.keys, moments.values))
        state = {
            "key_map": torch.from_numpy(key_map.astype(np.float32)),
            "value_map": torch.from_numpy(value_map.astype(np.float32)),
        }
        state |= {name.replace("map", "inverse"): matrix.mT.contiguous() for name, matrix in state.items()}
        shared = {}
        for group, size in enumerate(sizes):
            shared[f"levels_{group}"] = sphere_levels(size, config.bits - 1 - group)
            shared[f"projection_{group}"] = transforms.random_hadamard(size, config.seed + 1).forward
        return state | every_layer(geometry, shared)

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        state = self.layer_state(layer_idx, x.device)
        packed: Packed = {}
        for group, part in enumerate(torch.split(x, _group_sizes(self.geometry), dim=-1)):
            name, levels = f"{kind}_{group}", state[f"levels_{group}"]
            unit, packed[f"{name}_norms"] = split_norm(part)
            codes = quantize(unit, midpoints(levels))
            packed[f"{name}_codes"] = pack_codes(codes, self.config.bits - 1 - group)
            residual = unit - levels[codes.int()]
            packed[f"{name}_signs"], packed[f"{name}_residual_norms"] = sketch(state[f"projection_{group}"], residual)
        return packed

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        state = self.layer_state(layer_idx, packed[f"{kind}_0_codes"].device)
        parts = []
        for group, size in enumerate(_group_sizes(self.geometry)):
            name = f"{kind}_{group}"
            codes = unpack_codes(packed[f"{name}_codes"], self.config.bits - 1 - group)
            signs, norms = packed[f"{name}_signs"], packed[f"{name}_residual_norms"]
            unit = state[f"levels_{group}"][codes.int()]
            unit = unit + unsketch(state[f"projection_{group}"], orthogonal_gain(size), signs, norms)
            parts.append(unit * packed[f"{name}_norms"].float())
        return torch.cat(parts, dim=-1)


def _group_sizes(geometry: Geometry) -> list[int]:
    """Halves of the channels; if a half is not a multiple of 8, the first group is rounded down to one."""
    first = geometry.head_dim // (2 * GROUP_SIZE) * GROUP_SIZE
    return [first, geometry.head_dim - first]


def _sorting_rotation(moments: Moments, sizes: list[int], seed: int) -> Array:
    """Permutation to falling mean square followed by a rotation of each group, [layers, heads, D, D]."""
    mean_square = np.diagonal(moments.second_moment, axis1=-2, axis2=-1)
    order = np.argsort(-mean_square, axis=-1, kind="stable")
    blocks = np.zeros((sum(sizes), sum(sizes)))
    start = 0
    for size in sizes:
        blocks[start : start + size, start : start + size] = transforms.random_hadamard(size, seed).forward
        start += size
    permutation = np.eye(sum(sizes))[order]
    return np.asarray(blocks @ permutation)
