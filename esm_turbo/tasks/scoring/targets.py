"""A target whose continuations are scored: recomputed with every candidate, cached for them, or given as a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.tasks.common.arms import prefill_ids
from esm_turbo.tasks.common.memory import check_memory

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.proteins.tokens import TokenCodes


@dataclass(frozen=True)
class Run:
    """What a forward of masked candidates of one length takes besides them.

    Attributes:
        prefix: tokens before the candidate that run with it.
        options: of the forward: the context, positions.
    """

    prefix: list[int]
    options: dict[str, Any]


class Target(ABC):
    """A target as one of the arms uses it.

    Attributes:
        residues: how many it has.
        refresh: how many of them run again with every candidate; 0 where all do.
    """

    residues: int
    refresh: int

    @abstractmethod
    def run(self, length: int) -> Run:
        """The forward of candidates of so many residues.

        Raises:
            NotEnoughMemoryError: the target needs more memory than there is.
        """


class RecomputedTarget(Target):
    """The target as a part of every run.

    Args:
        turbo: the model.
        token_ids: of the target's residues.
    """

    def __init__(self, turbo: ContextModel, token_ids: list[int]) -> None:
        self.turbo = turbo
        self.prefix = [turbo.codes.cls, *token_ids]
        self.residues, self.refresh = len(token_ids), 0

    def run(self, length: int) -> Run:
        check_memory(self.turbo.model.esm, len(self.prefix) + length + 1, stored=False)
        return Run(self.prefix, {})


class CachedTarget(Target):
    """The target as a context that is computed for the candidates.

    Args:
        turbo: the model.
        token_ids: of the target's residues.
        arm: `frozen` or `turbo`.
        place: what stands in the candidate's place while the context is computed: `masked` or `empty`.
        refresh: the last residues, at most, that run again with every candidate.
    """

    def __init__(self, turbo: ContextModel, token_ids: list[int], arm: str, place: str, refresh: int) -> None:
        self.turbo = turbo
        self.token_ids = token_ids
        self.arm = arm
        self.place = place
        self.residues, self.refresh = len(token_ids), min(refresh, len(token_ids))
        self._run: Run | None = None

    def run(self, length: int) -> Run:
        # Computed alone it is the same for all lengths.
        if self._run is None or self.place == "masked":
            codes, kept = self.turbo.codes, self.residues - self.refresh
            after = [*[codes.mask] * length, codes.eos] if self.place == "masked" else []
            # The context before this one is let go first.
            self._run = None
            cache = prefill_ids(self.turbo, [codes.cls, *self.token_ids, *after], self.arm)
            cache.crop(1 + kept)
            self._run = Run(self.token_ids[kept:], {"past_key_values": cache})
        return self._run


class StoredTarget(Target):
    """The target as a given cache, which is not changed.

    Args:
        cache: of one row without `<eos>`.
        codes: of the model's tokenizer.
        refresh: as of `CachedTarget`.

    Raises:
        ValueError: the cache has several rows, no residues, or an `<eos>`.
    """

    def __init__(self, cache: TurboKVCache, codes: TokenCodes, refresh: int) -> None:
        if cache.batch_size != 1:
            raise ValueError(f"a target is a cache of one row, this one has {cache.batch_size}: see `cache.select`")
        length = cache.get_seq_length()
        ids = cache.token_ids[0, :length].tolist()
        special = sum(token == codes.cls for token in ids)
        if codes.eos in ids:
            raise ValueError("the cache holds an <eos>, which comes after the candidate: see `turbo.prefill`")
        if length == special:
            raise ValueError("the cache holds no residues: prefill a target first")
        self.residues, self.refresh = length - special, min(refresh, length - special)
        self.prefix = ids[length - self.refresh :]
        self.next_position = int(cache.next_positions[0])
        positions = cache.positions
        self.positions = None if positions is None else positions[0, length - self.refresh : length].tolist()
        if self.refresh:
            cache = cache.select(0)
            cache.crop(length - self.refresh)
        self.cache = cache

    def run(self, length: int) -> Run:
        options: dict[str, Any] = {"past_key_values": self.cache}
        if self.positions is not None:
            after = range(self.next_position, self.next_position + length + 1)
            options["position_ids"] = torch.tensor([[*self.positions, *after]])
        return Run(self.prefix, options)
