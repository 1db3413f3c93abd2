"""Dropping parts of a cache: columns at its front, and the ends of its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.config import PRESETS, PRODUCT_PRESETS
from esm_turbo.kv import storage
from tests.helpers.models import MASK, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]


@torch.no_grad()
def probe(model: TurboEsmForMaskedLM, cache: TurboKVCache, hidden: int = 0) -> Tensor:
    """Hidden states of three tokens after each row, the first `hidden` columns hidden."""
    ids = torch.tensor([[5, MASK, 9]]).expand(cache.batch_size, -1)
    mask = torch.cat([cache.valid().long(), torch.ones_like(ids)], dim=1)
    mask[:, :hidden] = 0
    return model(ids, mask, past_key_values=cache, output_hidden_states=True).hidden_states[-1]


def prefill(model: TurboEsmForMaskedLM, lengths: list[int], first_position: int = 0, **options: object) -> TurboKVCache:
    ids, mask = random_ids(lengths, **options)
    positions = torch.arange(ids.shape[1])[None] + first_position
    with torch.no_grad():
        cache: TurboKVCache = model(ids, mask, positions, use_cache=True).past_key_values
    return cache


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dropped", [64, 128])
def test_dropping_equals_hiding(tiny_model: MakeModel, preset: str, dropped: int) -> None:
    model = tiny_model(preset=preset, calibrated=True)
    cache = prefill(model, [200, 150, 40])
    hidden = probe(model, cache, dropped)
    before = cache.nbytes
    cache.drop_front(dropped)
    assert cache.lengths.tolist() == [200 - dropped, 150 - dropped, 0]
    assert cache.columns == cache.get_seq_length() == 200 - dropped
    assert cache.nbytes < before
    torch.testing.assert_close(probe(model, cache)[:2], hidden[:2], rtol=0, atol=1e-3)


@pytest.mark.parametrize("preset", [*PRODUCT_PRESETS, "turboquant3", "int4"])
def test_a_special_token_behind_the_dropped_columns_stays(tiny_model: MakeModel, preset: str) -> None:
    model = tiny_model(preset=preset, calibrated=True)
    cache = prefill(model, [100, 90], eos=True)
    hidden = probe(model, cache, 64)
    cache.drop_front(64)
    if cache.config.protect_special_tokens:
        assert cache.protected_columns.tolist() == [[35], [25]]
    # Protected keys are rounded to bfloat16 again.
    torch.testing.assert_close(probe(model, cache), hidden, rtol=0, atol=0.02)


@pytest.mark.parametrize("preset", PRODUCT_PRESETS)
def test_a_cache_works_on_after_dropping(tiny_model: MakeModel, preset: str, tmp_path: Path) -> None:
    """Appending, cropping, saving and dropping again give what they give for a cache whose front is hidden."""
    model = tiny_model(preset=preset, calibrated=True)
    kept, dropped = prefill(model, [150, 140]), prefill(model, [150, 140])
    dropped.drop_front(64)
    more, _ = random_ids([30, 30], seed=1, cls=False)
    for cache, hidden in ((kept, 64), (dropped, 0)):
        mask = torch.cat([cache.valid().long(), torch.ones_like(more)], dim=1)
        mask[:, :hidden] = 0
        with torch.no_grad():
            model(more, mask, past_key_values=cache, use_cache=True)
    # The keys' angles are rounded differently, which may move a code across a boundary.
    torch.testing.assert_close(probe(model, dropped), probe(model, kept, 64), rtol=0, atol=5e-3)
    for cache in (kept, dropped):
        cache.crop(-10)
    dropped.drop_front(64)
    dropped.save(tmp_path / "cache.safetensors")
    loaded = TurboKVCache.load(tmp_path / "cache.safetensors", model=model)
    assert loaded.lengths.tolist() == [42, 32]
    torch.testing.assert_close(probe(model, loaded), probe(model, kept, 128), rtol=0, atol=5e-3)


def test_positions_after_dropping(tiny_model: MakeModel) -> None:
    # `exact` stores keys at their positions, which stay; `turbo3` stores them relative to blocks, which move.
    for preset, expected in (("exact", [100, 80]), ("turbo3", [36, 16])):
        cache = prefill(tiny_model(preset=preset), [100, 80])
        cache.drop_front(64)
        assert cache.next_positions.tolist() == expected
        selected = cache.select(1)
        assert selected.next_positions.tolist() == expected[1:]
        # Positions that the caller gave.
        moved = prefill(tiny_model(preset=preset), [100, 80], first_position=7)
        moved.drop_front(64)
        assert moved.next_positions.tolist() == [n + 7 for n in expected]


def test_what_cannot_be_dropped(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(preset="turbo3")
    cache = prefill(model, [100], eos=True)
    for tokens in (-64, 1, 63):
        with pytest.raises(ValueError, match=f"multiple of 64, and not negative, got {tokens}"):
            cache.drop_front(tokens)
    with pytest.raises(ValueError, match="multiple of 1, and not negative"):
        prefill(tiny_model(), [10]).drop_front(-1)
    ids, _ = random_ids([74])
    restarting = torch.cat([torch.arange(64), torch.arange(10)])[None]
    with torch.no_grad():
        restarted = model(ids, None, restarting, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="positions begin again behind the first 64 tokens"):
        restarted.drop_front(64)
    cache.save(tmp_path / "cache.safetensors")
    loaded = TurboKVCache.load(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="bind_cache"):
        loaded.drop_front(64)
    model.bind_cache(loaded)
    loaded.drop_front(64)
    assert loaded.lengths.tolist() == [36]


def test_dropping_nothing_and_all(tiny_model: MakeModel) -> None:
    model = tiny_model(preset="turbo3")
    cache = prefill(model, [100])
    before = probe(model, cache)
    cache.drop_front(0)
    assert torch.equal(probe(model, cache), before)
    cache.drop_front(128)
    assert cache.get_seq_length() == cache.columns == 0
    model.new_cache().drop_front(64)
    assert probe(model, cache).isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.drop_front(64),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
    ],
)
def test_an_interrupted_change_leaves_the_cache_as_it_was(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, change: Callable[[TurboKVCache], None]
) -> None:
    model = tiny_model(preset="turbo3")
    cache = prefill(model, [100, 80], eos=True)
    expected = probe(model, cache)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            change(cache)
    assert torch.equal(probe(model, cache), expected)
