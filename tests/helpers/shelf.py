"""A store of contexts in memory, which knows what it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from esm_turbo import TurboConfig, TurboEsm, TurboKVCache


class Shelf:
    """Contexts by their tokens and storage.

    Attributes:
        asked: tokens of all contexts that were looked up, in another thread than the main one.
        kept: the contexts.
        before: called with the number of each look-up, from 1, before it is answered.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.kept: dict[Any, TurboKVCache] = {}
        self.before: Callable[[int], object] = lambda number: None

    def find(self, turbo: Any, token_ids: Sequence[Sequence[int]], config: TurboConfig, /) -> list[TurboKVCache | None]:
        assert threading.current_thread() is not threading.main_thread()
        return [self._find(tuple(ids), config) for ids in token_ids]

    def _find(self, ids: tuple[int, ...], config: TurboConfig) -> TurboKVCache | None:
        self.asked.append(ids)
        self.before(len(self.asked))
        found = self.kept.get((config.name, *ids))
        return None if found is None else found.select(0)

    def asked_for(self, turbo: TurboEsm, residues: str) -> int:
        """How many contexts that begin with these residues were looked up."""
        start = [turbo.codes.cls, *turbo.codes.encode(residues, "a protein")]
        return sum(list(ids[: len(start)]) == start for ids in self.asked)

    def keep(self, turbo: Any, token_ids: Sequence[Sequence[int]], cache: TurboKVCache, config: Any, /) -> None:
        self.kept |= {(config.name, *ids): cache.select(row) for row, ids in enumerate(token_ids)}

    def get_or_compute(self, turbo: Any, token_ids: Sequence[int], config: Any, compute: Any, /) -> TurboKVCache:
        raise AssertionError("not one by one")

    def get_or_prefill(self, turbo: Any, sequences: Sequence[str], /) -> TurboKVCache:
        raise AssertionError("not of tokens")
