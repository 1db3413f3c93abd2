"""The target of a score: which of its residues are cached, and which are refreshed with every candidate.

A refreshed residue runs again with each candidate, and its cached keys and values are dropped. The last `refresh`
residues of a target are refreshed, since they lie next to the candidate and depend on it most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.tasks.common.arms import prefill_ids, single_row
from esm_turbo.tasks.common.memory import check_memory
from esm_turbo.tasks.common.options import Arm, Place

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.proteins.tokens import TokenCodes


@dataclass(frozen=True)
class TargetRun:
    """The target's part in a forward of masked candidates.

    Attributes:
        prefix: tokens that run before each candidate: the refreshed residues, or the whole target.
        options: further arguments of the forward: the cached context and positions.
    """

    prefix: list[int]
    options: dict[str, Any]


class Target(ABC):
    """A target as one of the arms uses it.

    Attributes:
        residues: number of residues.
        refresh: number of refreshed residues; 0 if the whole target runs with every candidate.
    """

    residues: int
    refresh: int

    @abstractmethod
    def run(self, length: int) -> TargetRun:
        """The target's part in a forward of candidates of `length` residues.

        Raises:
            NotEnoughMemoryError: the target does not fit into memory.
        """


class RecomputedTarget(Target):
    """A target that runs as a whole with every candidate.

    Args:
        turbo: the model.
        token_ids: the target's residues.
    """

    def __init__(self, turbo: ContextModel, token_ids: list[int]) -> None:
        self.turbo = turbo
        self.prefix = [turbo.codes.cls, *token_ids]
        self.residues, self.refresh = len(token_ids), 0

    def run(self, length: int) -> TargetRun:
        check_memory(self.turbo.model.esm, len(self.prefix) + length + 1, stored=False)
        return TargetRun(self.prefix, {})


class CachedTarget(Target):
    """A target that is prefilled for its candidates.

    Args:
        turbo: the model.
        token_ids: the target's residues.
        arm: `frozen` or `turbo`.
        place: contents of the candidate's positions during the prefill: `masked` or `empty`.
        refresh: number of residues at the end that run again with every candidate; at most all.
    """

    def __init__(self, turbo: ContextModel, token_ids: list[int], arm: Arm, place: Place, refresh: int) -> None:
        self.turbo = turbo
        self.token_ids = token_ids
        self.arm = arm
        self.place = place
        self.residues, self.refresh = len(token_ids), min(refresh, len(token_ids))
        self._run: TargetRun | None = None

    def run(self, length: int) -> TargetRun:
        # A context computed without the candidate serves all lengths.
        if self._run is None or self.place == "masked":
            codes, kept = self.turbo.codes, self.residues - self.refresh
            after = [*[codes.mask] * length, codes.eos] if self.place == "masked" else []
            # Frees the previous context before the next one is computed.
            self._run = None
            cache = prefill_ids(self.turbo, [codes.cls, *self.token_ids, *after], self.arm)
            cache.crop(1 + kept)
            self._run = TargetRun(self.token_ids[kept:], {"past_key_values": cache})
        return self._run


class StoredTarget(Target):
    """A target given as a cache, which is not changed.

    Args:
        cache: one row without `<eos>`.
        codes: token ids of the model's tokenizer.
        refresh: as for `CachedTarget`.

    Raises:
        ValueError: the cache has several rows, no residues, or an `<eos>`.
    """

    def __init__(self, cache: TurboKVCache, codes: TokenCodes, refresh: int) -> None:
        ids = single_row(cache, "a target")
        length = len(ids)
        special = ids.count(codes.cls)
        if codes.eos in ids:
            raise ValueError("the cache holds an <eos>, which belongs after the candidate: see `turbo.prefill`")
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

    def run(self, length: int) -> TargetRun:
        options: dict[str, Any] = {"past_key_values": self.cache}
        if self.positions is not None:
            after = range(self.next_position, self.next_position + length + 1)
            options["position_ids"] = torch.tensor([[*self.positions, *after]])
        return TargetRun(self.prefix, options)
