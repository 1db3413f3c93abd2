"""Targets: which residues are cached, which are refreshed with a candidate, and caches that are refused."""

from __future__ import annotations

import pytest
import torch

from esm_turbo import TurboEsm
from esm_turbo.tasks.common import arms, memory
from esm_turbo.tasks.common.memory import NotEnoughMemoryError
from esm_turbo.tasks.scoring import targets
from esm_turbo.tasks.scoring.targets import cached_target, recomputed_target, stored_target
from tests.helpers.models import CLS, EOS, MASK

TARGET = "MKTAYIAKQRQISFVK"


@pytest.fixture
def ids(exact: TurboEsm) -> list[int]:
    """Token ids of the target's residues."""
    return exact.codes.encode(TARGET, "target")


def test_a_recomputed_target_runs_as_a_whole(exact: TurboEsm, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = recomputed_target(exact, ids)
    assert (target.residues, target.refresh) == (16, 0)
    run = target.run(3)
    assert (run.prefix, run.options) == ([CLS, *ids], {})
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10)
    # <cls>, 16 residues, the candidate and <eos>.
    with pytest.raises(NotEnoughMemoryError, match=r"^21 tokens"):
        target.run(3)


@pytest.mark.parametrize(("refresh", "kept"), [(0, 16), (1, 15), (5, 11), (16, 0), (10_000, 0)])
@pytest.mark.parametrize("place", ["masked", "empty"])
def test_the_last_residues_are_refreshed(exact: TurboEsm, ids: list[int], place: str, refresh: int, kept: int) -> None:
    """They run before the candidate, and the cache ends before them; `<cls>` is always cached."""
    target = cached_target(exact, ids, "frozen", place, refresh)
    assert (target.residues, target.refresh) == (16, 16 - kept)
    run = target.run(3)
    assert run.prefix == ids[kept:]
    cache = run.options["past_key_values"]
    assert cache.token_ids[0, : cache.get_seq_length()].tolist() == [CLS, *ids[:kept]]
    stored = stored_target(exact.prefill(TARGET), exact.codes, refresh)
    assert (stored.residues, stored.refresh, stored.run(3).prefix) == (16, 16 - kept, ids[kept:])
    assert stored.run(3).options["past_key_values"].get_seq_length() == 1 + kept


def test_contexts_are_computed_with_masks_in_the_place_of_the_candidate(
    exact: TurboEsm, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefilled: list[list[int]] = []

    def noting(model: TurboEsm, token_ids: list[int], arm: str, store: None) -> object:
        prefilled.append(token_ids)
        return arms.prefill_ids(model, token_ids, arm)

    monkeypatch.setattr(targets, "prefill_ids", noting)
    masked = cached_target(exact, ids, "frozen", "masked", 2)
    masked.run(2), masked.run(3)
    assert prefilled == [[CLS, *ids, *[MASK] * n, EOS] for n in (2, 3)]
    prefilled.clear()
    alone = cached_target(exact, ids, "frozen", "empty", 2)
    assert alone.run(2) is alone.run(3)
    assert prefilled == [[CLS, *ids]]


def test_a_stored_target_leaves_its_cache_as_it_is(exact: TurboEsm) -> None:
    cache = exact.prefill(TARGET)
    before = [{name: x.clone() for name, x in layer.packed.items()} for layer in cache.layers]
    stored_target(cache, exact.codes, 5).run(3)
    assert cache.lengths.tolist() == [17]
    for layer, old in zip(cache.layers, before, strict=True):
        assert all(torch.equal(layer.packed[name], x) for name, x in old.items())


@torch.no_grad()
def test_a_stored_target_keeps_the_positions_of_its_cache(exact: TurboEsm, ids: list[int]) -> None:
    positions = [*range(10), *range(50, 57)]
    cache = exact.model(
        torch.tensor([[CLS, *ids]]), position_ids=torch.tensor([positions]), use_cache=True
    ).past_key_values
    run = stored_target(cache, exact.codes, 9).run(2)
    # Two refreshed residues before the gap, seven after it, the candidate and <eos>.
    assert run.options["position_ids"].tolist() == [[8, 9, *range(50, 57), 57, 58, 59]]
    assert "position_ids" not in stored_target(exact.prefill(TARGET), exact.codes, 9).run(2).options


@torch.no_grad()
def test_caches_that_are_refused(exact: TurboEsm) -> None:
    with pytest.raises(ValueError, match="a target must be a cache of one row, this one has 2"):
        stored_target(exact.prefill([TARGET, TARGET]), exact.codes, 0)
    whole = exact.tokenizer(TARGET, return_tensors="pt").input_ids
    with pytest.raises(ValueError, match="holds an <eos>, which belongs after the candidate"):
        stored_target(exact.model(whole, use_cache=True).past_key_values, exact.codes, 0)
    empty = exact.prefill(TARGET)
    empty.crop(1)
    with pytest.raises(ValueError, match="holds no residues"):
        stored_target(empty, exact.codes, 0)
