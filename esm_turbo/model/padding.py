"""Parts of a packed row that are padded to compute them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Pairs of tokens, padding included, of the parts of one padded tensor. A processor's cache holds one protein.
_MAX_PAIRS = {"cuda": 2**24}


class Padding:
    """Parts of a row as one padded tensor; a single part is a view of the row.

    Args:
        parts: slices of the row; they may overlap.
        device: of the indices.

    Attributes:
        longest: elements of the longest part.
        mask: places that are no padding, bool [parts, longest]; None if there is none.
    """

    def __init__(self, parts: Sequence[slice], device: torch.device) -> None:
        self._only = parts[0] if len(parts) == 1 else None
        lengths: list[int] = [part.stop - part.start for part in parts]
        self.longest = max(lengths)
        self.mask: Tensor | None = None
        if self._only is None:
            places = torch.arange(self.longest)
            mask = places < torch.tensor(lengths)[:, None]
            index = torch.tensor([part.start for part in parts])[:, None] + places * mask
            self._index, self._rows = index.to(device), index[mask].to(device)
            self._places = mask.flatten().nonzero()[:, 0].to(device)
            self.mask = None if bool(mask.all()) else mask.to(device)

    def pad(self, x: Tensor) -> Tensor:
        """Parts of x [heads, row, ...] as [heads, parts, longest, ...]; in place of padding a part's first element."""
        return x[:, self._only].unsqueeze(1) if self._only is not None else x[:, self._index.to(x.device)]

    def unpad(self, x: Tensor) -> Tensor:
        """Parts one after the other, [heads, elements, ...], of padded ones [heads, parts, longest, ...]."""
        x = x.flatten(1, 2)
        return x if self._only is not None else x[:, self._places.to(x.device)]

    def add_to(self, row: Tensor, x: Tensor) -> None:
        """Add padded parts x [heads, parts, longest] to a row [heads, row], wherever it has their elements."""
        if self._only is not None:
            row[:, self._only] += x[:, 0]
        else:
            row.index_add_(1, self._rows, self.unpad(x))


def parts_together(lengths: Sequence[int], device: torch.device) -> Iterator[slice]:
    """Slices of neighbouring parts, by their lengths, whose attention is computed together."""
    most = _MAX_PAIRS.get(device.type, 0)
    first = longest = 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > first and (number + 1 - first) * longest**2 > most:
            yield slice(first, number)
            first, longest = number, length
    if lengths:
        yield slice(first, len(lengths))
