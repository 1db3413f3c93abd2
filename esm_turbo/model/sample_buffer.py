"""The bounded sample of tokens of a calibration."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.fitting.statistics import TokenSample


class SampleBuffer:
    """Bounded sample of tokens: those of lowest priority number among all seen.

    Args:
        size: largest number of tokens.

    Attributes:
        priorities: of the tokens held, int64 [tokens], in no order.
        tokens: the fields of `sample` with tokens as their first dimension, on the device of the first ones added.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.priorities = np.zeros(0, dtype=np.int64)
        self.tokens: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A buffer travels on the host."""
        return vars(self) | {"tokens": {name: x.cpu() for name, x in self.tokens.items()}}

    def candidates(self, priorities: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Indices of the tokens that would enter the sample."""
        highest = self.priorities.max() if len(self.priorities) == self.size else 2**63 - 1
        inside = np.flatnonzero(priorities < highest)
        best: npt.NDArray[np.int64] = inside[np.argsort(priorities[inside], kind="stable")[: self.size]]
        return best

    def add(self, priorities: npt.NDArray[np.int64], **tokens: Tensor) -> None:
        """Add tokens, given as tensors [tokens, ...] for every field of `sample`; those that leave are overwritten."""
        held = len(self.priorities)
        every = np.concatenate([self.priorities, priorities])
        leaving = np.ones(len(every), dtype=np.bool_)
        leaving[np.argsort(every, kind="stable")[: self.size]] = False
        slots, entering = np.flatnonzero(leaving[:held]), np.flatnonzero(~leaving[held:])
        # Those that find no slot lengthen the sample, which is not full then.
        replacing, lengthening = entering[: len(slots)], entering[len(slots) :]
        self.priorities[slots] = priorities[replacing]
        self.priorities = np.append(self.priorities, priorities[lengthening])
        for name, new in tokens.items():
            mine = self.tokens.get(name, new[:0])
            if len(slots):
                mine[_rows(slots, mine)] = new[_rows(replacing, new)].to(mine.device)
            if len(lengthening):
                mine = torch.cat([mine, new[_rows(lengthening, new)].to(mine.device)])
            self.tokens[name] = mine

    def sample(self) -> TokenSample:
        """The sample so far, in the order of priorities."""
        order = np.argsort(self.priorities, kind="stable")

        def ordered(name: str) -> Tensor:
            return self.tokens[name][_rows(order, self.tokens[name])]

        def stack(name: str) -> npt.NDArray[np.float32]:
            """A field as [layers, heads, tokens, ...]."""
            stacked: npt.NDArray[np.float32] = ordered(name).movedim(0, 2).contiguous().cpu().float().numpy()
            return stacked

        return TokenSample(
            stack("keys"),
            stack("values"),
            ordered("is_special").numpy(),
            ordered("positions").numpy(),
            stack("key_weights"),
            stack("value_weights"),
        )


def _rows(indices: npt.NDArray[np.int64], of: Tensor) -> Tensor:
    return torch.from_numpy(indices).to(of.device)
