"""Contexts in slots of slabs, read in place: as the same contexts in a cache of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from esm_turbo import TurboConfig, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.model.static_cache import StaticKVCache
from tests.helpers.models import random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]
LENGTHS = [21, 5, 70, 13, 40]
# Slab and slot of each context; the slots between hold another one.
PLACES = [(0, 2), (0, 0), (1, 1), (0, 3), (1, 0)]


@pytest.fixture(scope="module", params=["exact", DEFAULT_PRESET, "paper"])
def model(request: pytest.FixtureRequest, tiny_model: MakeModel) -> TurboEsmForMaskedLM:
    return tiny_model(preset=request.param)


@pytest.fixture
def cache(model: TurboEsmForMaskedLM) -> TurboKVCache:
    with torch.no_grad():
        return model(*random_ids(LENGTHS, masks=1), use_cache=True).past_key_values


def slabs_of(cache: TurboKVCache) -> list[StaticKVCache]:
    """Two slabs with contexts at `PLACES`, and the longest one everywhere else."""
    made = []
    for number, columns, slots in ((0, 64, 4), (1, 128, 2)):
        rows = [1] * slots
        for context, (slab, slot) in enumerate(PLACES):
            if slab == number:
                rows[slot] = context
        made.append(StaticKVCache.like(cache.select(rows), columns))
    return made


def read(model: TurboEsmForMaskedLM, cache: TurboKVCache, *arguments: torch.Tensor, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return model(*arguments, past_key_values=cache, **options).logits


def test_a_pool_is_read_as_a_cache(model: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    """Slab by slab, in any order of rows: to 1e-5 of the largest logit, as sums over other columns."""
    pooled = PooledContexts.of(slabs_of(cache), PLACES)
    assert pooled.lengths.tolist() == LENGTHS
    assert torch.equal(pooled.token_ids * pooled.valid(), cache.token_ids * cache.valid())
    assert pooled.nbytes == cache.nbytes
    new, index = random_ids([3] * 6, seed=1, masks=1, cls=False)[0], [3, 2, 0, 2, 4, 3]
    shown = torch.cat([cache.valid()[index].long(), torch.ones(6, 3, dtype=torch.int64)], dim=1)
    shown[:, 2] = 0
    for arguments in ((new,), (new, shown)):
        expected = read(model, cache, *arguments, context_index=index)
        found = read(model, pooled, *arguments, context_index=index)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(read(model, pooled, new[:5]), read(model, pooled, new[:5], context_index=range(5)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", ["exact", DEFAULT_PRESET, "paper"])
@pytest.mark.parametrize("n", [1, 21])
def test_a_pool_on_a_device_is_read_as_a_cache(tiny_model: MakeModel, preset: str, dtype: torch.dtype, n: int) -> None:
    """With masks and without: to 1e-5 of the largest logit in float32, a few roundings in bfloat16."""
    model = tiny_model(preset=preset).to("cuda", dtype)
    with torch.no_grad():
        cache = model(*(x.cuda() for x in random_ids(LENGTHS, masks=1)), use_cache=True).past_key_values
    pooled = PooledContexts.of(slabs_of(cache), PLACES)
    new, index = random_ids([n] * 6, seed=1, cls=False)[0].cuda(), [3, 2, 0, 2, 4, 3]
    shown = torch.cat([cache.valid()[index].long(), torch.ones(6, n, dtype=torch.int64, device="cuda")], dim=1)
    shown[:, 2] = 0
    model.esm.captures = False
    alone = torch.cat([read(model, cache.select(own), new[[row]]) for row, own in enumerate(index)])
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-5
    assert (read(model, pooled, new, context_index=index) - alone).abs().max() <= tolerance * alone.abs().max()
    for arguments in ((new,), (new, shown)):
        expected = read(model, cache, *arguments, context_index=index)
        found = read(model, pooled, *arguments, context_index=index)
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_cropped_and_selected_contexts_stay_in_place(model: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    slabs = slabs_of(cache)
    pooled, own = PooledContexts.of(slabs, PLACES), copy.copy(cache)
    before = [slab.lengths.clone() for slab in slabs]
    for contexts in (pooled, own):
        contexts.crop(-2)
        contexts.batch_select_indices(torch.tensor([4, 0, 2]))
    new = random_ids([3] * 3, seed=1, cls=False)[0]
    expected = read(model, own, new)
    assert (read(model, pooled, new) - expected).abs().max() <= 1e-5 * expected.abs().max()
    # One context in several rows is cropped alike.
    for contexts in (twice := pooled.select([0, 0, 1])), (own_twice := own.select([0, 0, 1])):
        contexts.crop(torch.tensor([3, 3, 2]))
    expected = read(model, own_twice, new)
    assert (read(model, twice, new) - expected).abs().max() <= 1e-5 * expected.abs().max()
    alone = pooled.select(1)
    expected = read(model, own.select(1), new)
    assert (read(model, alone, new) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert all(map(torch.equal, before, (slab.lengths for slab in slabs)))


def test_released_contexts_are_not_read(model: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    hold = SimpleNamespace(released=False)
    hold.release = lambda: setattr(hold, "released", True)
    new = random_ids([3], seed=1, cls=False)[0]
    with PooledContexts.of(slabs_of(cache), PLACES[:1], hold) as pooled:
        assert torch.isfinite(read(model, pooled, new)).all()
    with pytest.raises(ValueError, match="the contexts have been released: hold them"):
        read(model, pooled, new)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("an append", lambda pooled, model: model(torch.zeros(5, 1).long(), past_key_values=pooled, use_cache=True)),
        ("dropping tokens", lambda pooled, model: pooled.drop_front(1)),
        ("dropping refinements", lambda pooled, model: pooled.drop_refinements()),
        ("saving", lambda pooled, model: pooled.save("file")),
        ("moving", lambda pooled, model: pooled.to("cpu")),
        ("concatenating", lambda pooled, model: TurboKVCache.cat([pooled])),
        ("concatenating", lambda pooled, model: TurboKVCache.cat([pooled.slabs[0], pooled])),
        ("decoding", lambda pooled, model: model.esm.decoded(pooled)),
        ("cutting", lambda pooled, model: pooled.cut(LENGTHS)),
        ("a length for each", lambda pooled, model: pooled.select([0, 0, 1]).crop(torch.tensor([3, 2, 1]))),
        ("repeating rows", lambda pooled, model: pooled.batch_repeat_interleave(2)),
        ("pickling", lambda pooled, model: pickle.dumps(pooled)),
    ],
)
@torch.no_grad()
def test_what_needs_a_cache_of_its_own(
    model: TurboEsmForMaskedLM, cache: TurboKVCache, what: str, call: Callable[..., object]
) -> None:
    message = "only a cache of its own can be decoded" if what == "decoding" else f"are read in place: {what}"
    with pytest.raises(ValueError, match=message):
        call(PooledContexts.of(slabs_of(cache), PLACES), model)


def test_a_context_of_another_kind(tiny_model: MakeModel) -> None:
    caches = []
    for preset in ("exact", TurboConfig.from_preset(DEFAULT_PRESET)):
        with torch.no_grad():
            caches.append(tiny_model(preset=preset)(*random_ids([9, 5]), use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="cannot concatenate caches of presets exact and turbo3: row 1"):
        PooledContexts.of(caches, [(0, 1), (1, 0)])
    with pytest.raises(ValueError, match="presets turbo3 and exact: row 2 differs from row 0"):
        PooledContexts.of(caches, [(1, 0), (1, 1), (0, 0)])
    with pytest.raises(ValueError, match="at least one context"):
        PooledContexts.of(caches, [])
