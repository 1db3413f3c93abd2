"""The target of a score: which of its residues are cached, and which are refreshed with every candidate.

A refreshed residue runs again with each candidate, and its cached keys and values are dropped. The last `refresh`
residues of a target are refreshed, since they lie next to the candidate and depend on it most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.tasks.common.arms import ContextSource, prefill_ids, single_row
from esm_turbo.tasks.common.memory import check_memory
from esm_turbo.tasks.common.options import Arm, CandidateFill

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


@dataclass(frozen=True)
class Target:
    """A target as one of the arms uses it.

    Attributes:
        residues: number of residues.
        refresh: number of refreshed residues; 0 if the whole target runs with every candidate.
        run: returns the target's part in a forward of candidates of a given number of residues. Raises
            NotEnoughMemoryError if the target does not fit into memory.
    """

    residues: int
    refresh: int
    run: Callable[[int], TargetRun]


def recomputed_target(turbo: ContextModel, token_ids: list[int]) -> Target:
    """A target, given as its residues, that runs as a whole with every candidate."""
    prefix = [turbo.codes.cls, *token_ids]

    def run(length: int) -> TargetRun:
        check_memory(turbo.model.base_model, len(prefix) + length + 1)
        return TargetRun(prefix, {})

    return Target(len(token_ids), 0, run)


def cached_target(
    turbo: ContextModel,
    token_ids: list[int],
    arm: Arm,
    place: CandidateFill,
    refresh: int,
    store: ContextSource | None = None,
) -> Target:
    """A target that is prefilled for its candidates.

    Args:
        token_ids: the target's residues.
        arm: `frozen` or `turbo`.
        place: contents of the candidate's positions during the prefill: `masked` or `empty`.
        refresh: number of residues at the end that run again with every candidate; at most all.
        store: holds contexts.
    """
    codes, refresh = turbo.codes, min(refresh, len(token_ids))
    kept = len(token_ids) - refresh
    latest: TargetRun | None = None

    def run(length: int) -> TargetRun:
        nonlocal latest
        # A context computed without the candidate serves all lengths.
        if latest is None or place == "masked":
            after = [*[codes.mask] * length, codes.eos] if place == "masked" else []
            # Frees the previous context before the next one is computed.
            latest = None
            cache = prefill_ids(turbo, [codes.cls, *token_ids, *after], arm, store)
            cache.crop(1 + kept)
            latest = TargetRun(token_ids[kept:], {"past_key_values": cache})
        return latest

    return Target(len(token_ids), refresh, run)


def stored_target(cache: TurboKVCache, codes: TokenCodes, refresh: int) -> Target:
    """A target given as a cache, which is not changed.

    Args:
        cache: one row without `<eos>`.
        codes: token ids of the model's tokenizer.
        refresh: as for `cached_target`.

    Raises:
        ValueError: the cache has several rows, no residues, or an `<eos>`.
    """
    ids = single_row(cache, "a target")
    residues = len(ids) - ids.count(codes.cls)
    if codes.eos in ids:
        raise ValueError("the cache holds an <eos>, which belongs after the candidate: see `turbo.prefill`")
    if residues == 0:
        raise ValueError("the cache holds no residues: prefill a target first")
    refresh = min(refresh, residues)
    kept = len(ids) - refresh
    next_position = int(cache.next_positions[0])
    positions = None if cache.positions is None else cache.positions[0, kept : len(ids)].tolist()
    context = cache
    if refresh:
        context = cache.select(0)
        context.crop(kept)

    def run(length: int) -> TargetRun:
        options: dict[str, Any] = {"past_key_values": context}
        if positions is not None:
            after = range(next_position, next_position + length + 1)
            options["position_ids"] = torch.tensor([[*positions, *after]])
        return TargetRun(ids[kept:], options)

    return Target(residues, refresh, run)
