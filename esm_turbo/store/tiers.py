"""Contexts in memory up to a number of bytes, with the least recently used ones evicted first.

By hand, as an `OrderedDict` does the most of it: `cachetools` would be one more dependency for a dozen lines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ContextT = TypeVar("ContextT")


class Tier(Generic[KeyT, ContextT]):
    """Contexts in one kind of memory.

    Args:
        budget: maximum bytes of all contexts; 0 keeps none.

    Attributes:
        nbytes: bytes of all contexts.
        evicted: number of contexts evicted.

    Raises:
        ValueError: the budget is negative.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"a budget must be at least 0 bytes, got {budget}")
        self.budget = budget
        self.nbytes = self.evicted = 0
        # With their bytes, as counting these walks the tensors of some.
        self._contexts: OrderedDict[KeyT, tuple[ContextT, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, key: KeyT) -> ContextT | None:
        """The context of a key, now the most recently used; None if it is not here."""
        if key not in self._contexts:
            return None
        self._contexts.move_to_end(key)
        return self._contexts[key][0]

    def put(self, key: KeyT, context: ContextT, nbytes: int) -> None:
        """Keep a context of `nbytes` unless it exceeds the budget, and evict others to make room."""
        if key in self._contexts:
            self.nbytes -= self._contexts.pop(key)[1]
        if not self.fits(nbytes):
            return
        self._contexts[key] = context, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self._contexts.popitem(last=False)[1][1]
            self.evicted += 1

    def fits(self, nbytes: int) -> bool:
        """True if a context of `nbytes` would be kept."""
        return nbytes <= self.budget

    def clear(self) -> None:
        """Drops all contexts."""
        self._contexts.clear()
        self.nbytes = 0

    def info(self) -> dict[str, Any]:
        """Budget and use, JSON values."""
        return {"budget": self.budget, "bytes": self.nbytes, "contexts": len(self), "evicted": self.evicted}
