"""Keys in groups of 32 consecutive tokens: the common base of codecs that store something once per group.

What a group shares is stored once per row, and every token stores the index of its group in one byte. A group is fixed
when a context is written, so that nothing can be appended to it.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from esm_turbo.codecs.base import Packed
from esm_turbo.codecs.peers.data_free import DataFreeCodec

KEY_GROUP = 32
"""Tokens of a group of keys."""


class GroupedCodec(DataFreeCodec):
    """Codec whose keys are encoded by `summarize`, which knows the tokens of every row.

    Attributes:
        max_groups: number of groups that a context may have.
    """

    max_groups = 256
    rows_alike = False

    def transform(
        self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `KVCodec.transform`.

        Raises:
            ValueError: the tokens follow others, or there are more than `max_groups` groups of them.
        """
        if columns is not None and columns.numel() and bool((columns[:, 0] > 0).any()):
            raise ValueError(
                f"a cache of preset {self.config.name!r} cannot be appended to: its groups of keys are fixed when the"
                " context is written; prefill the longer context"
            )
        most = self.max_groups * KEY_GROUP
        if keys.shape[2] > most:
            raise ValueError(f"preset {self.config.name!r} stores at most {most} tokens, got {keys.shape[2]}")
        return super().transform(layer_idx, keys, values, columns)

    def encode(self, layer_idx: int, keys: Tensor, values: Tensor) -> Packed:
        """See `KVCodec.encode`; the result includes what groups share."""
        keys, values = self.transform(layer_idx, keys, values)
        packed = self.quantize(layer_idx, keys, values)
        mask = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
        return packed | self.summarize(layer_idx, keys, values, packed, mask)

    @abstractmethod
    def summarize(self, layer_idx: int, keys: Tensor, values: Tensor, packed: Packed, mask: Tensor) -> Packed:
        """See `KVCodec.summarize`; writes the codes of the keys into `packed`."""


def group_indices(x: Tensor) -> Tensor:
    """The group of every token of x [B, H, L, D], uint8 [B, H, L, 1]."""
    groups = (torch.arange(x.shape[2], device=x.device) // KEY_GROUP).to(torch.uint8)
    return groups[:, None].expand(*x.shape[:3], 1).contiguous()


def by_group(x: Tensor, fill: float) -> Tensor:
    """Reshape [B, H, L, D] to [B, H, groups, 32, D], the last group padded with `fill`."""
    missing = -x.shape[2] % KEY_GROUP
    padded = torch.cat([x, x.new_full((*x.shape[:2], missing, x.shape[3]), fill)], dim=2)
    return padded.view(*x.shape[:2], -1, KEY_GROUP, x.shape[3])


def of_group(shared: Tensor, groups: Tensor) -> Tensor:
    """What every token's group shares, [B, H, L, n], from [B, H, 1, groups, n] and indices [B, H, L, 1]."""
    return shared.squeeze(2).gather(2, groups.long().expand(-1, -1, -1, shared.shape[-1]))
