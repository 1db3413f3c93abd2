"""Contexts for a store, computed as far as memory permits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from esm_turbo.context_model import ContextModel
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.store.filling import Computed
from esm_turbo.store.flat import FlatBatch
from esm_turbo.store.requests import PrefillRequest
from esm_turbo.tasks.common.memory import cache_bytes, check_memory, halve_until_it_fits, too_large


def prefill_wanted(
    turbo: ContextModel, on_failure: Callable[[str, str], None] | None, wanted: Sequence[PrefillRequest]
) -> list[Computed]:
    """Computes contexts at once, in parts if memory requires it.

    Args:
        turbo: the model.
        on_failure: called with each sequence that does not fit into memory, and the reason.
        wanted: the contexts.

    Raises:
        NotEnoughMemoryError: a sequence does not fit into memory, and `on_failure` is None.
    """
    esm = turbo.model.base_model

    def prefill(part: Sequence[int]) -> Computed:
        own = [wanted[index] for index in part]
        longest = max(one.tokens for one in own)
        check_memory(esm, longest, rows=len(own), more=cache_bytes(esm, longest * len(own)))
        totals: dict[str, list[int]] = {}
        if any((one.total_tokens, one.total_masks) != (one.tokens, one.masks) for one in own):
            totals = {
                "total_tokens": [one.total_tokens for one in own],
                "total_masks": [one.total_masks for one in own],
            }
        cache = turbo.prefill_within_call([one.sequence for one in own], **totals)
        return Computed([one.key for one in own], FlatBatch.of(cache, [one.tokens for one in own]))

    def fail(index: int, error: Exception) -> None:
        reason = too_large(wanted[index].tokens - 1, turbo.model.device)
        if on_failure is None:
            raise NotEnoughMemoryError(f"a sequence: {reason}")
        on_failure(wanted[index].sequence, reason)

    return halve_until_it_fits(prefill, range(len(wanted)), fail)
