"""KIVI (Liu et al. 2024, arXiv:2402.02750): keys by channel, values by token, the last tokens at full precision.

Keys have a scale and a zero per channel and 32 tokens, values per token and 32 components (`integer`), all in float16.
Of a context of L tokens the last min(L, R) values and the last L mod R keys stay at full precision, here float16: R is
32, as in the authors' examples with the fewest such tokens; 128, as in others, would be most of a protein domain. This
tail is that of the context when it was written. Cropping a context shortens it, tokens before it stay quantised, and a
context to which tokens were appended would need another one: it is written as a whole.

The tail is stored once per row, beside codes that nobody reads, and every token stores its place in it in one byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.packing import pack_codes, unpack_codes
from esm_turbo.codecs.peers.grouped import KEY_GROUP, GroupedCodec, by_group, group_indices, of_group
from esm_turbo.codecs.peers.integer import codes_in_range, pack_asymmetric, range_of, to_float16, unpack_asymmetric

RESIDUAL_LENGTH = 32
"""R, a multiple of the tokens of a group."""
_IN_TAIL = 255


class KiviCodec(GroupedCodec):
    """Asymmetric integers, keys grouped along the context, and an exact tail."""

    allowed_bits = (1, 2, 3, 4, 5, 6, 7)
    # The last index of a byte marks the keys of the tail.
    max_groups = _IN_TAIL

    def pack(self, layer_idx: int, kind: str, x: Tensor) -> Packed:
        """See `KVCodec.pack`; `summarize` fills in what depends on the tokens of each row."""
        if kind == "value":
            codes, ranges = pack_asymmetric(x, self.config.bits)
            return {"value_codes": codes, "value_ranges": ranges}
        groups = group_indices(x)
        return {
            "key_codes": pack_codes(torch.zeros_like(x, dtype=torch.uint8), self.config.bits),
            "key_groups": groups,
            "tail_places": torch.zeros_like(groups),
        }

    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        """See `KVCodec.summarize`; writes the keys' codes and the places in the tail into `packed`."""
        columns = torch.arange(keys.shape[2], device=keys.device)
        lengths = ((columns + 1) * mask).amax(1)
        whole = lengths // RESIDUAL_LENGTH * RESIDUAL_LENGTH
        coded = (columns < whole[:, None])[:, None, :, None]
        from_end = lengths[:, None] - columns
        places = from_end.where((from_end > 0) & (from_end <= RESIDUAL_LENGTH), 0)
        packed["tail_places"].copy_(places[:, None, :, None])
        packed["key_groups"].masked_fill_(~coded, _IN_TAIL)

        ignored = ~(mask[:, None, :, None] & coded)
        low = by_group(keys.masked_fill(ignored, torch.inf), torch.inf).amin(3)
        high = by_group(keys.masked_fill(ignored, -torch.inf), -torch.inf).amax(3)
        empty = low > high
        scale, zero = range_of(low.masked_fill(empty, 0), high.masked_fill(empty, 0), self.config.bits)
        groups, in_tail = scale.shape[2], RESIDUAL_LENGTH - 1
        # On a device exact sizes would force a sync, so that these upper bounds are used.
        if mask.device.type == "cpu" and len(mask):
            groups, in_tail = max(1, int(whole.max()) // KEY_GROUP), int((lengths - whole).max())
        rows = {
            "key_scales": scale[:, :, None, :groups],
            "key_zeros": zero[:, :, None, :groups],
            "tail_keys": _tail(keys, lengths, lengths - whole, in_tail),
            "tail_values": _tail(values, lengths, lengths, RESIDUAL_LENGTH),
        }
        codes = codes_in_range(keys, *_ranges(packed | rows), self.config.bits).masked_fill(~coded, 0)
        packed["key_codes"].copy_(pack_codes(codes, self.config.bits))
        return rows

    def unpack(self, layer_idx: int, kind: str, packed: Packed) -> Tensor:
        if kind == "value":
            x = unpack_asymmetric(packed["value_codes"], packed["value_ranges"], self.config.bits)
        else:
            scale, zero = _ranges(packed)
            x = unpack_codes(packed["key_codes"], self.config.bits).float() * scale.float() + zero.float()
        tail, places = packed[f"tail_{kind}s"], packed["tail_places"]
        exact = of_group(tail, (places.long() - 1).clamp(0, tail.shape[3] - 1)).float()
        return torch.where(places > 0 if kind == "value" else packed["key_groups"] == _IN_TAIL, exact, x)


def _ranges(packed: Packed) -> tuple[Tensor, Tensor]:
    """Scale and zero of every token's group, float16 [B, H, L, D] each; those of the tail have no meaning."""
    groups = packed["key_groups"].clamp_max(packed["key_scales"].shape[3] - 1)
    scale, zero = (of_group(packed[name], groups) for name in ("key_scales", "key_zeros"))
    return scale, zero


def _tail(x: Tensor, lengths: Tensor, tokens: Tensor, most: int) -> Tensor:
    """The last `tokens` [B] of every row, the last one first, then zeros, float16 [B, H, 1, at least 1, D]."""
    places = torch.arange(max(1, min(most, x.shape[2])), device=x.device)
    columns = (lengths[:, None] - 1 - places).clamp_min(0)
    tail = x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return to_float16(tail.masked_fill((places >= tokens[:, None])[:, None, :, None], 0))[:, :, None]
