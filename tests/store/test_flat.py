"""Contexts of a batch in one buffer: byte for byte those of its rows, cut out and copied one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.kv.storage import CacheStorage
from esm_turbo.store import flat
from esm_turbo.store.flat import FlatBatch, FlatContext
from tests.helpers.models import CACHE_CONFIGS, EOS, random_ids
from tests.helpers.triton_devices import on_devices, right_triton  # noqa: F401

MakeModel = Callable[..., TurboEsmForMaskedLM]
LENGTHS = [40, 17, 40, 1]


@pytest.fixture(scope="module")
def models(tiny_model: MakeModel) -> dict[str, TurboEsmForMaskedLM]:
    return {name: tiny_model(preset=config, calibrated=True) for name, config in CACHE_CONFIGS.items()}


@torch.no_grad()
def prefill(model: TurboEsmForMaskedLM, lengths: list[int], *, twice: bool = False, eos: bool = False) -> TurboKVCache:
    """A batch of contexts; `twice` gives the first one a second special token."""
    ids, mask = random_ids(lengths, eos=eos)
    if twice:
        ids[0, 3] = EOS
    cache: TurboKVCache = model(ids.to(model.device), mask.to(model.device), use_cache=True).past_key_values
    return cache


def assert_rows(batch: FlatBatch, cache: TurboKVCache, lengths: list[int]) -> None:
    expected = [FlatContext.of(row) for row in cache.cut(lengths)]
    assert [one.parts for one in batch.contexts] == [one.parts for one in expected]
    for found, one in zip(batch.contexts, expected, strict=True):
        assert torch.equal(found.buffer, one.buffer)
    # One after the other, with nothing between them.
    assert torch.equal(batch.buffer, torch.cat([one.buffer for one in expected]))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    name=st.sampled_from(sorted(CACHE_CONFIGS)),
    twice=st.booleans(),
    eos=st.booleans(),
    crop=st.booleans(),
)
def test_a_batch_is_its_rows(
    models: dict[str, TurboEsmForMaskedLM], lengths: list[int], name: str, twice: bool, eos: bool, crop: bool
) -> None:
    cache = prefill(models[name], lengths, twice=twice and lengths[0] > 4, eos=eos and min(lengths) > 1)
    if crop:
        # Spare columns stay behind.
        cache.crop(9)
        lengths = cache.lengths.tolist()
    assert_rows(FlatBatch.of(cache, lengths), cache, lengths)


@on_devices()
def test_rows_are_copied_in_two_launches(tiny_model: MakeModel, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    original = flat.Cutter._launch

    def noting(self: flat.Cutter, *arguments: object) -> None:
        launches.append(self)
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheStorage, "_on_cpu", False)
    monkeypatch.setattr(flat, "_all_slots_stay", lambda *_: True)
    monkeypatch.setattr(flat.Cutter, "_launch", noting)
    for preset in ("turbo3", "exact"):
        model = tiny_model(preset=preset, calibrated=True).to(device)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                cache = prefill(model, [40, 17, 40, 2])
                batch = FlatBatch.of(cache, [40, 17, 40, 2])
                assert len(launches) == 1
                assert_rows(batch, cache, [40, 17, 40, 2])
            launches.clear()


def test_on_the_host_nothing_is_copied(models: dict[str, TurboEsmForMaskedLM]) -> None:
    batch = FlatBatch.of(prefill(models["protected"], LENGTHS), LENGTHS)
    assert [one.buffer.data_ptr() for one in batch.on_host()] == [one.buffer.data_ptr() for one in batch.contexts]


@pytest.mark.gpu
@pytest.mark.parametrize("copied", [1, 20_000, 1 << 26])
def test_contexts_are_brought_to_the_host(tiny_model: MakeModel, copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "_COPIED_BYTES", copied)
    model = tiny_model(preset="turbo3").to("cuda")
    # The row of one token alone would keep fewer slots, and is cut out first.
    for lengths in (LENGTHS, LENGTHS[:3]):
        cache = prefill(model, lengths)
        batch = FlatBatch.of(cache, lengths)
        assert_rows(batch, cache, lengths)
        found = list(batch.on_host())
        assert [one.parts for one in found] == [one.parts for one in batch.contexts]
        for one, expected in zip(found, batch.contexts, strict=True):
            assert one.buffer.is_pinned()
            assert torch.equal(one.buffer, expected.buffer.cpu())


def test_groups_hold_so_many_bytes(models: dict[str, TurboEsmForMaskedLM], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = FlatBatch.of(prefill(models["protected"], LENGTHS), LENGTHS)
    sizes = [one.nbytes for one in batch.contexts]
    for most, expected in ((1, [1, 1, 1, 1]), (sizes[0] + sizes[1], [2, 2]), (sum(sizes), [4])):
        monkeypatch.setattr(flat, "_COPIED_BYTES", most)
        groups = list(batch._groups())
        assert [len(group) for group in groups] == expected
        assert [id(one) for group in groups for one in group] == [id(one) for one in batch.contexts]
