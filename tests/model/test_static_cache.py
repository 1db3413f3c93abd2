"""Static caches: read like any other, and written into in any mode."""

import pytest
import torch

from esm_turbo import TurboEsmForMaskedLM
from esm_turbo.model.static_cache import StaticKVCache
from tests.helpers.models import make_config, make_esm, random_ids, rounding

PRESETS = ("exact", "paper", "turbo3", "turbo1")
LENGTHS = ([21, 9, 13], [5, 30, 3])
ROUNDING = 2 * rounding(make_config())


def contexts(model, lengths, seed=0):
    ids, mask = (x.to(model.device) for x in random_ids(lengths, seed=seed))
    with torch.no_grad():
        return model(ids, mask, use_cache=True).past_key_values


def assert_close(found, expected, tolerance=ROUNDING):
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= tolerance


@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_a_static_cache_is_read_like_any_other(tiny_model, preset):
    """Also after loading contexts of other lengths, and with masks over all of its columns."""
    model = tiny_model(preset=preset)
    new_ids, new_mask = random_ids([4, 2, 3], seed=1, cls=False)
    static = None
    for seed, lengths in enumerate(LENGTHS):
        cache = contexts(model, lengths, seed)
        if static is None:
            static = StaticKVCache.like(cache, 40)
            kept = [tensor for layer in static.layers for tensor in layer.packed.values()]
        else:
            static.copy_(cache)
        assert static.columns == static.get_seq_length() == 40
        assert static.lengths.tolist() == lengths
        assert all(a is b for a, b in zip(kept, (t for x in static.layers for t in x.packed.values()), strict=True))
        expected = model(new_ids, new_mask, past_key_values=cache).logits
        assert_close(model(new_ids, new_mask, past_key_values=static).logits, expected)
        past = torch.zeros(3, 40, dtype=torch.int64)
        past[:, : cache.columns] = cache.valid()
        past[:, 1] = 0
        both = torch.cat([past, new_mask], dim=1)
        seen = torch.cat([past[:, : cache.get_seq_length()], new_mask], dim=1)
        expected = model(new_ids, seen, past_key_values=cache).logits
        assert_close(model(new_ids, both, past_key_values=static).logits, expected)


def test_a_static_cache_shares_nothing_and_does_not_grow(tiny_model):
    model = tiny_model(preset="turbo3")
    cache = contexts(model, [21, 9, 13])
    before = cache.layers[0].packed["key_0"].clone()
    static = StaticKVCache.like(cache)
    static.copy_(contexts(model, [20, 8, 12], seed=5))
    assert torch.equal(cache.layers[0].packed["key_0"], before)
    ids, _ = random_ids([2, 2, 2], cls=False)
    with torch.no_grad(), pytest.raises(ValueError, match="nothing can be appended to a static cache"):
        model(ids, past_key_values=static, use_cache=True)


@torch.no_grad()
def test_contexts_that_do_not_fit_are_refused(tiny_model):
    model, other = tiny_model(preset="turbo3"), tiny_model(preset="paper")
    cache = contexts(model, [21, 9, 13])
    with pytest.raises(ValueError, match="at least the context's 21, got 20"):
        StaticKVCache.like(cache, 20)
    with pytest.raises(ValueError, match="the cache is empty, or no model has claimed it"):
        StaticKVCache.like(model.new_cache())
    static = StaticKVCache.like(cache)
    with pytest.raises(ValueError, match="of the same model, options and calibration"):
        static.copy_(contexts(other, [21, 9, 13]))
    for lengths in ([22, 9, 13], [21, 9, 13, 4]):
        with pytest.raises(ValueError, match="room for 3 rows of up to 21 columns"):
            static.copy_(contexts(model, lengths))
    ids, _ = random_ids([12, 9, 8])
    shifted = model(ids, position_ids=torch.arange(12)[None] + 3, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="all contexts or none must store positions"):
        static.copy_(shifted)
    dropped = contexts(model, [21, 9, 13])
    dropped.drop_refinements()
    ids = random_ids([2, 2, 2], cls=False)[0]
    before = model(ids, past_key_values=static).logits
    with pytest.raises(ValueError, match="refinements were dropped"):
        static.copy_(dropped)
    # A refused copy changes nothing.
    assert torch.equal(model(ids, past_key_values=static).logits, before)


@torch.no_grad()
def test_contexts_of_another_model_are_refused(tiny_model):
    """Also if both share a codec, because it is not fitted to a model."""
    model, other = (TurboEsmForMaskedLM.from_esm(make_esm(seed=seed), preset="exact") for seed in (0, 1))
    assert model.esm.codec(model.esm.turbo_config) is other.esm.codec(other.esm.turbo_config)
    static = StaticKVCache.like(contexts(model, [21]))
    with pytest.raises(ValueError, match="must be of the same model"):
        static.copy_(contexts(other, [21]))


def test_modes_are_mixed(tiny_model):
    """Static caches made in inference mode are written into outside of it."""
    _mix_modes(tiny_model(preset="turbo3"))


@pytest.mark.interpreter
def test_modes_are_mixed_by_the_kernels(tiny_model):
    """The kernels cache protected tokens in the model's coordinates."""
    _mix_modes(tiny_model(preset="turbo3", backend="triton"))


def _mix_modes(model):
    ids = random_ids([2, 2], seed=1, cls=False)[0]
    with torch.inference_mode():
        cache = contexts(model, [21, 9])
        made = contexts(model, [13, 20], seed=2)
        expected = model(ids, past_key_values=made).logits
        static = StaticKVCache.like(cache, 30)
        model(ids, past_key_values=static)
    with torch.no_grad():
        assert_close(model(ids, past_key_values=made).logits, expected)
        static.copy_(made)
        assert_close(model(ids, past_key_values=static).logits, expected)
    with torch.inference_mode():
        static.copy_(cache)
        static.copy_(made)
        assert_close(model(ids, past_key_values=static).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_an_extension_does_not_wait_for_the_device(tiny_model, preset):
    model = tiny_model(preset=preset).to("cuda")
    cache = contexts(model, [21, 9, 13])
    ids = random_ids([4, 4, 4], cls=False)[0].cuda()
    # The first may stack weights, whose new addresses the second one looks at.
    for _ in range(2):
        model(ids, past_key_values=cache)
    host_ids = ids.cpu()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(ids, past_key_values=cache)
        # Special tokens among those that are stored are counted, on the host.
        model(host_ids, past_key_values=cache, use_cache=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [25, 13, 17]
