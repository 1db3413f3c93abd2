"""QJL (Zandieh, Daliri and Han 2024, arXiv:2406.03482): keys as signs of random projections, values as integers.

`QjlCodec` is the method for keys without outliers. A key stores `bits` signs per component, of projections
orthogonalised as in section 4 of the paper, and its norm in bfloat16; scores are unbiased (see `jl`). Values are
quantised per token to `bits` bits in groups (`integer`).

`QjlOutlierCodec` is the method with its outlier channels, at the settings of the authors' program (heads of 128
channels, 32 layers). In every group of 32 keys and every head, one channel of sixteen is kept apart, those with the
largest norms; their numbers take a byte each. The outliers of a key have a sketch and a norm of their own. Both
sketches have `bits` signs per component of the head; in the first 15 of 32 layers that of the outliers has one, and the
other twice `bits`. The program also holds up to 128 of the last tokens at full precision, which would be most of a
protein domain: none is held here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.peers.data_free import DataFreeCodec
from esm_turbo.codecs.peers.grouped import GroupedCodec, by_group, group_indices, of_group
from esm_turbo.codecs.peers.integer import pack_asymmetric, unpack_asymmetric
from esm_turbo.codecs.peers.jl import orthogonal_gain, orthogonal_projection, sketch, unsketch
from esm_turbo.config import Geometry, TurboConfig

_CHANNELS_PER_OUTLIER = 16
_INITIAL_LAYERS = 15 / 32


class QjlCodec(DataFreeCodec):
    """Sign sketches of keys, integers for values."""

    allowed_bits: tuple[int, ...] = (1, 2, 3, 4, 5, 6)

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        dim = geometry.head_dim
        return {"projection": orthogonal_projection(config.bits * dim, dim, config.seed)}

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        if kind == "key":
            signs, norms = sketch(self.layer_state(layer_idx, x.device)["projection"], x)
            return {"key_signs": signs, "key_norms": norms}
        codes, ranges = pack_asymmetric(x, self.config.bits)
        return {"value_codes": codes, "value_ranges": ranges}

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        if kind == "value":
            return unpack_asymmetric(packed["value_codes"], packed["value_ranges"], self.config.bits)
        projection = self.layer_state(layer_idx, packed["key_signs"].device)["projection"]
        gain = orthogonal_gain(self.geometry.head_dim)
        return unsketch(projection, gain, packed["key_signs"], packed["key_norms"])


class QjlOutlierCodec(GroupedCodec, QjlCodec):
    """Sign sketches of the channels with the largest norms and of the others, integers for values."""

    allowed_bits = (1, 2, 3)

    @classmethod
    def arrays(cls, config: TurboConfig, geometry: Geometry) -> Mapping[str, ArrayLike]:
        dim = geometry.head_dim
        return {"projection": orthogonal_projection(2 * config.bits * dim, dim, config.seed)}

    @property
    def num_outliers(self) -> int:
        """Channels that are kept apart."""
        return max(1, self.geometry.head_dim // _CHANNELS_PER_OUTLIER)

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        """See `KVCodec.pack`; `summarize` fills in the keys, whose outliers are those of the tokens of each row."""
        if kind == "value":
            return super().pack(layer_idx, kind, x)
        return {"key_groups": group_indices(x)} | self._sketches(layer_idx, torch.zeros_like(x), torch.zeros_like(x))

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        """See `KVCodec.summarize`; writes the sketches of the keys into `packed`."""
        read = keys.masked_fill(~mask[:, None, :, None], 0)
        # In units of each head's largest component: squares of large numbers leave the range of float32.
        largest = read.abs().amax((2, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        energy = by_group(read / largest, 0).square().sum(3)
        rows = {"key_outliers": energy.topk(self.num_outliers, dim=-1).indices.to(torch.uint8)[:, :, None]}
        apart = self._apart(rows["key_outliers"], packed["key_groups"])
        for name, x in self._sketches(layer_idx, keys.masked_fill(apart, 0), keys.masked_fill(~apart, 0)).items():
            packed[name].copy_(x)
        return rows

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        if kind == "value":
            return super().unpack(layer_idx, kind, packed)
        gain = orthogonal_gain(self.geometry.head_dim)
        inliers, outliers = (
            unsketch(projection, gain, packed[f"key_{part}signs"], packed[f"key_{part}norms"])
            for part, projection in self._projections(layer_idx, packed["key_signs"].device).items()
        )
        return torch.where(self._apart(packed["key_outliers"], packed["key_groups"]), outliers, inliers)

    def _projections(self, layer_idx: int, device: torch.device) -> dict[str, Tensor]:
        """Rows that sketch the channels that are no outliers, and those that sketch the outliers."""
        projection, dim = self.layer_state(layer_idx, device)["projection"], self.geometry.head_dim
        initial = layer_idx < round(_INITIAL_LAYERS * self.geometry.num_layers)
        most = self.config.bits * dim
        return {"": projection[: 2 * most if initial else most], "outlier_": projection[: dim if initial else most]}

    def _sketches(self, layer_idx: int, inliers: Tensor, outliers: Tensor) -> Packed:
        packed = {}
        for (part, projection), x in zip(
            self._projections(layer_idx, inliers.device).items(), (inliers, outliers), strict=True
        ):
            packed[f"key_{part}signs"], packed[f"key_{part}norms"] = sketch(projection, x)
        return packed

    def _apart(self, outliers: Tensor, groups: Tensor) -> Tensor:
        """Which channels of every token are outliers, bool [B, H, L, D]."""
        numbers = of_group(outliers, groups).long()
        apart = torch.zeros(*groups.shape[:3], self.geometry.head_dim, dtype=torch.bool, device=groups.device)
        return apart.scatter_(-1, numbers, True)
