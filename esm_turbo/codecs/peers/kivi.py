"""KIVI (Liu et al. 2024, arXiv:2402.02750): keys by channel, values by token.

Keys have a scale and a zero per channel and 32 columns, values per token and 32 components (`integer`), all in float16.
The scales of keys are stored once per row, and every token stores the index of its group in one byte. KIVI keeps the
last tokens of a context at full precision until they fill a group; here the last group is quantised like the others. A
group's scales are fixed when a context is written, so that nothing can be appended to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.packing import pack_codes, unpack_codes
from esm_turbo.codecs.peers.data_free import DataFreeCodec
from esm_turbo.codecs.peers.integer import codes_in_range, pack_asymmetric, range_of, unpack_asymmetric

KEY_GROUP = 32
_MAX_COLUMNS = 256 * KEY_GROUP


class KiviCodec(DataFreeCodec):
    """Asymmetric integers, keys grouped along the context."""

    allowed_bits = (1, 2, 3, 4, 5, 6, 7)

    def transform(
        self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `KVCodec.transform`.

        Raises:
            ValueError: the tokens follow others, or there are more than 8,192.
        """
        if columns is not None and columns.numel() and bool((columns[:, 0] > 0).any()):
            raise ValueError(
                f"a cache of preset {self.config.name!r} cannot be appended to: the scales of its keys are fixed per"
                " group of tokens when the context is written; prefill the longer context"
            )
        if keys.shape[2] > _MAX_COLUMNS:
            raise ValueError(f"preset {self.config.name!r} stores at most {_MAX_COLUMNS} tokens, got {keys.shape[2]}")
        return super().transform(layer_idx, keys, values, columns)

    def encode(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        """See `KVCodec.encode`; the result includes the scales of the keys."""
        keys, values = self.transform(layer_idx, keys, values)
        packed = self.quantize(layer_idx, keys, values)
        mask = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
        return packed | self.summarize(layer_idx, keys, values, packed, mask)

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        """See `KVCodec.pack`; `summarize` fills in the codes of the keys, since it knows the tokens of each row."""
        if kind == "value":
            codes, ranges = pack_asymmetric(x, self.config.bits)
            return {"value_codes": codes, "value_ranges": ranges}
        groups = (torch.arange(x.shape[2], device=x.device) // KEY_GROUP).to(torch.uint8)
        return {
            "key_codes": pack_codes(torch.zeros_like(x, dtype=torch.uint8), self.config.bits),
            "key_groups": groups[:, None].expand(*x.shape[:3], 1).contiguous(),
        }

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        """See `KVCodec.summarize`; writes the codes of the keys into `packed`."""
        ignored = ~mask[:, None, :, None]
        low = _by_group(keys.masked_fill(ignored, torch.inf), torch.inf).amin(3)
        high = _by_group(keys.masked_fill(ignored, -torch.inf), -torch.inf).amax(3)
        empty = low > high
        scale, zero = range_of(low.masked_fill(empty, 0), high.masked_fill(empty, 0), self.config.bits)
        rows = {"key_scales": scale[:, :, None], "key_zeros": zero[:, :, None]}
        scale, zero = self._ranges(packed | rows)
        packed["key_codes"].copy_(pack_codes(codes_in_range(keys, scale, zero, self.config.bits), self.config.bits))
        return rows

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        if kind == "value":
            return unpack_asymmetric(packed["value_codes"], packed["value_ranges"], self.config.bits)
        scale, zero = self._ranges(packed)
        return unpack_codes(packed["key_codes"], self.config.bits).float() * scale.float() + zero.float()

    def _ranges(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Scale and zero of every token's group, float16 [B, H, L, D] each."""
        index = packed["key_groups"].long().expand(-1, -1, -1, self.geometry.head_dim)
        scale, zero = (packed[name].squeeze(2).gather(2, index) for name in ("key_scales", "key_zeros"))
        return scale, zero


def _by_group(x: Tensor, fill: float) -> Tensor:
    """Reshape [B, H, L, D] to [B, H, groups, 32, D], the last group padded with `fill`."""
    missing = -x.shape[2] % KEY_GROUP
    padded = torch.cat([x, x.new_full((*x.shape[:2], missing, x.shape[3]), fill)], dim=2)
    return padded.view(*x.shape[:2], -1, KEY_GROUP, x.shape[3])
