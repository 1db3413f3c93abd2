"""Memory estimates against PyTorch's allocations, and batches that are halved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from esm_turbo import TurboEsm
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.tasks.common import memory
from esm_turbo.tasks.common.forwards import FROZEN, prefill_ids
from esm_turbo.tasks.common.memory import cache_bytes, check_memory, forward_bytes, halve_until_it_fits
from tests.helpers.allocation import peak_allocation
from tests.helpers.models import random_ids


@pytest.mark.parametrize("arm", ["plain", "frozen", "turbo"])
def test_the_estimate_matches_a_forward(turbo: TurboEsm, arm: str) -> None:
    ids, _ = random_ids([600])
    esm = turbo.model.esm
    needed = forward_bytes(esm.config, 600, 4)
    if arm == "plain":
        with torch.no_grad():
            peak = peak_allocation(lambda: esm(ids))
    else:
        needed += cache_bytes(esm, 600, FROZEN if arm == "frozen" else None)
        peak = peak_allocation(lambda: prefill_ids(turbo, ids[0].tolist(), arm))
    assert 0.75 * peak < needed < 1.5 * peak


def test_eager_attention_materialises_its_scores(turbo: TurboEsm) -> None:
    config = turbo.model.esm.config
    more = forward_bytes(config, 1000, 2, eager=True) - forward_bytes(config, 1000, 2)
    assert more == 2 * 2 * config.num_attention_heads * 1000**2
    assert forward_bytes(config, 1000, 4) == 2 * forward_bytes(config, 1000, 2)


def test_the_error_names_both_sizes(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 * 2**30)
    esm = turbo.model.esm
    check_memory(esm, 1000, more=cache_bytes(esm, 1000))
    with pytest.raises(NotEnoughMemoryError) as caught:
        check_memory(esm, 1_000_000, more=cache_bytes(esm, 1_000_000))
    assert str(caught.value) == (
        f"1,000,000 tokens at once need about {_needed(turbo, 1_000_000):.1f} GiB of memory, 3.0 GiB are free on cpu;"
        " use fewer tokens, a smaller model or a larger machine"
    )
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    check_memory(esm, 1_000_000, more=cache_bytes(esm, 1_000_000))


def _needed(turbo: TurboEsm, tokens: int) -> float:
    esm = turbo.model.esm
    return (forward_bytes(esm.config, tokens, 4) + cache_bytes(esm, tokens)) / 2**30


@pytest.mark.parametrize("largest", [4, 3, 1, 0])
def test_a_batch_is_halved_until_it_fits(largest: int) -> None:
    def run(batch: Sequence[int]) -> list[int]:
        if len(batch) > largest or 5 in batch:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")
        return list(batch)

    failed: list[int] = []
    parts = halve_until_it_fits(run, range(8), lambda index, error: failed.append(index))
    good = [index for part in parts for index in part]
    assert all(0 < len(part) <= largest for part in parts)
    assert sorted(good + failed) == list(range(8)) and good == sorted(good)
    assert failed == ([5] if largest else list(range(8)))


def test_other_errors_are_not_halved() -> None:
    def run(batch: Sequence[int]) -> None:
        raise RuntimeError(f"a mistake in {len(batch)}")

    with pytest.raises(RuntimeError, match="a mistake in 8"):
        halve_until_it_fits(run, range(8), lambda index, error: None)
