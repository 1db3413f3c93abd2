"""Caches whose refinement planes are dropped: bytes, errors, and operations on them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.model.static_cache import StaticKVCache
from tests.helpers.models import CACHE_CONFIGS, random_ids
from tests.test_kv_cache import append, assert_caches_equal, assert_rows_equal, prefill, probe, rewrite

MakeModel = Callable[..., TurboEsmForMaskedLM]
TURBO = [name for name, config in PRODUCT_PRESETS.items() if config.codec == "turbo"]


@pytest.fixture(scope="module", params=[16, 64])
def model(request: pytest.FixtureRequest, tiny_model: MakeModel) -> TurboEsmForMaskedLM:
    """A model of a preset with planes in every layer."""
    for preset in TURBO:
        model = tiny_model(preset=preset, head_dim=request.param, heads=2)
        codec = model.esm.codec(preset)
        if all(codec.refinements(layer) for layer in range(2)):
            return model
    raise AssertionError("no preset has planes in every layer")


def planes(cache: TurboKVCache) -> list[dict[str, torch.Tensor]]:
    assert cache.codec is not None
    return [
        {name: layer.packed[name] for name in cache.codec.refinements(index)}
        for index, layer in enumerate(cache.layers)
    ]


def test_bytes_decrease_by_those_of_the_planes(model: TurboEsmForMaskedLM) -> None:
    """One bit per component of odd width, except keys or values that have nothing else."""
    cache, whole = prefill(model, [40, 17], eos=True), prefill(model, [40, 17], eos=True)
    cache.drop_refinements()
    assert cache.codec is not None
    dropped = sum(tensor.shape[1] * tensor.shape[3] for layer in planes(whole) for tensor in layer.values())
    assert dropped > 0
    assert whole.nbytes - cache.nbytes == 57 * dropped
    elements = cache.geometry.elements_per_token * 57
    assert cache.bits_per_element == pytest.approx(whole.bits_per_element - 8 * 57 * dropped / elements)
    for layer, (mine, before) in enumerate(zip(cache.layers, whole.layers, strict=True)):
        assert mine.packed.keys() == before.packed.keys() - cache.codec.refinements(layer)
        assert all(torch.equal(mine.packed[name], before.packed[name]) for name in mine.packed)
        assert mine.protected.keys() == before.protected.keys()
        assert mine.rows.keys() == before.rows.keys()


def test_components_change_by_half_a_step_at_most(model: TurboEsmForMaskedLM) -> None:
    cache, whole = prefill(model, [30]), prefill(model, [30])
    cache.drop_refinements()
    codec = model.esm.codec(cache.config)
    moved = False
    for layer, (mine, before) in enumerate(zip(cache.layers, whole.layers, strict=True)):
        for kind in ("key", "value"):
            read, whole_read = (codec.unpack(layer, kind, one.packed | one.rows) for one in (mine, before))
            distance = (read - whole_read).abs()
            # Without rows it would be exact.
            assert (torch.minimum(distance, (distance - 0.5).abs()) < 1e-4).all()
            moved |= bool(distance.any())
    assert moved


def test_extensions_are_similar_on_every_backend(model: TurboEsmForMaskedLM) -> None:
    cache, whole = prefill(model, [40, 17]), prefill(model, [40, 17])
    cache.drop_refinements()
    reference = TurboEsmForMaskedLM.from_esm(
        model, calibration=model.esm.calibration, preset=cache.config, backend="reference"
    )
    expected, found = probe(model, whole), probe(model, cache)
    assert (found - probe(reference, cache)).abs().max() <= 1e-4 * found.abs().max()
    exact = TurboEsmForMaskedLM.from_esm(model, preset="exact")
    truth = probe(exact, prefill(exact, [40, 17]))
    assert 0 < (expected - truth).norm() < (found - truth).norm() < truth.norm()


def test_later_appends_have_no_planes(model: TurboEsmForMaskedLM) -> None:
    early, late = prefill(model, [9, 4]), prefill(model, [9, 4])
    late.drop_refinements()
    for cache in (early, late):
        with torch.no_grad():
            # The same tokens on the same context: what is stored depends on what is read, planes or not.
            model(*random_ids([3, 2], seed=5, cls=False), past_key_values=cache, use_cache=True)
    early.drop_refinements()
    assert late.lengths.tolist() == [12, 6]
    assert early.nbytes == late.nbytes
    for mine, other in zip(early.layers, late.layers, strict=True):
        assert mine.packed.keys() == other.packed.keys()
        for name, tensor in mine.packed.items():
            assert torch.equal(tensor[0, :, :9], other.packed[name][0, :, :9])
            assert torch.equal(tensor[1, :, :4], other.packed[name][1, :, :4])
    # The first layer's keys and values do not depend on the context.
    assert all(torch.equal(tensor, late.layers[0].packed[name]) for name, tensor in early.layers[0].packed.items())
    assert torch.isfinite(probe(model, late)).all()


def test_an_emptied_cache_stores_planes_again(model: TurboEsmForMaskedLM) -> None:
    cache, once = prefill(model, [9, 4]), prefill(model, [9, 4])
    once.drop_refinements()
    for _ in range(2):
        cache.drop_refinements()
        assert_caches_equal(cache, once)
    cache.reset()
    with torch.no_grad():
        model(*random_ids([9, 4]), past_key_values=cache, use_cache=True)
    assert_caches_equal(cache, prefill(model, [9, 4]))


def test_reshaping(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [9, 4, 13])
    cache.drop_refinements()
    expected = copy.deepcopy(cache)
    assert_rows_equal(cache.select([2, 0]), [0, 1], expected, [2, 0])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 0]))
    assert_rows_equal(cache, [0, 1], expected, [2, 0])
    append(model, cache, [2, 2])
    cache.crop(-2)
    assert_rows_equal(cache, [0, 1], expected, [2, 0])


def test_save_and_load(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    cache, path = prefill(model, [9, 4], eos=True), tmp_path / "cache.safetensors"
    cache.save(path)
    whole, claimed = path.stat().st_size, TurboKVCache.load(path)
    with pytest.raises(ValueError, match=r"call model\.bind_cache"):
        claimed.drop_refinements()
    model.bind_cache(claimed)
    for one in (cache, claimed):
        one.drop_refinements()
    assert_caches_equal(cache, claimed)
    cache.save(path)
    assert path.stat().st_size < whole
    for loaded in (TurboKVCache.load(path), TurboKVCache.load(path, model=model)):
        assert_caches_equal(loaded, cache)
        assert torch.equal(probe(model, loaded), probe(model, cache))
        append(model, loaded, [1, 1])
        assert loaded.layers[0].packed.keys() == cache.layers[0].packed.keys()


def test_cat_takes_all_or_none_of_the_planes(model: TurboEsmForMaskedLM) -> None:
    """Nothing is lost silently."""
    whole, dropped = prefill(model, [9, 4], seed=1), prefill(model, [13], seed=2)
    dropped.drop_refinements()
    for caches in ([whole, dropped], [dropped, whole], [whole, whole, dropped]):
        with pytest.raises(ValueError, match="some of the caches only: call drop_refinements"):
            TurboKVCache.cat(caches)
    whole.drop_refinements()
    joined = TurboKVCache.cat([whole, model.new_cache(), dropped])
    assert_rows_equal(joined, [0, 1], whole, [0, 1])
    assert_rows_equal(joined, [2], dropped, [0])
    assert joined.nbytes == whole.nbytes + dropped.nbytes


@pytest.mark.parametrize("preset", ["exact", "paper", TurboConfig(codec="int8")], ids=str)
def test_codecs_without_planes(tiny_model: MakeModel, preset: str | TurboConfig) -> None:
    cache = prefill(tiny_model(preset=preset), [5])
    before = cache.nbytes
    with pytest.raises(ValueError, match="no planes that can be dropped"):
        cache.drop_refinements()
    assert cache.nbytes == before


@pytest.fixture
def saved(tiny_model: MakeModel, tmp_path: Path) -> tuple[TurboEsmForMaskedLM, Path]:
    model = tiny_model(preset=CACHE_CONFIGS["protected"])
    prefill(model, [9, 4]).save(tmp_path / "cache.safetensors")
    return model, tmp_path / "cache.safetensors"


@pytest.mark.parametrize(
    "change",
    [
        {"drop": "layers.1.packed.key_0"},
        {"drop": "layers.0.packed.value_0"},
        {"layers.0.packed.key_9": torch.zeros(2, 4, 9, 2, dtype=torch.uint8)},
        {"layers.0.packed.key_0": torch.zeros(2, 4, 9, 3, dtype=torch.uint8)},
    ],
    ids=lambda change: next(iter(change.values())) if "drop" in change else next(iter(change)),
)
def test_a_file_that_the_codec_cannot_read(
    saved: tuple[TurboEsmForMaskedLM, Path], change: dict[str, torch.Tensor]
) -> None:
    """Layers have tensors of different names, so that only the codec can check them."""
    model, path = saved
    rewrite(path, **change)
    with pytest.raises(ValueError, match=r"layer [01] of the cache holds"):
        TurboKVCache.load(path, model=model)
    with pytest.raises(ValueError, match=r"layer [01] of the cache holds"):
        probe(model, TurboKVCache.load(path))


@pytest.mark.parametrize("preset", TURBO)
def test_bits_of_a_context_of_1024_tokens(turbo: TurboEsm, preset: str) -> None:
    """Everything stored, including protected tokens and residuals, on the embedded model."""
    config = PRODUCT_PRESETS[preset]
    model = TurboEsmForMaskedLM.from_esm(turbo.model, calibration=turbo.calibration, preset=preset)
    cache = prefill(model, [1024], eos=True)
    assert (cache.protected_columns >= 0).sum() == 2
    assert config.mean_bits < cache.bits_per_element <= config.mean_bits + 0.05
    packed = sum(tensor.nbytes for layer in cache.layers for tensor in layer.packed.values())
    assert 8 * packed == config.mean_bits * cache.geometry.elements_per_token * 1024
    if any(planes(cache)):
        before = cache.bits_per_element
        cache.drop_refinements()
        assert cache.bits_per_element < before
    else:
        with pytest.raises(ValueError, match="no planes that can be dropped"):
            cache.drop_refinements()


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_is_dropped_is_freed(model: TurboEsmForMaskedLM, is_cut: bool) -> None:
    """Also after the cache was copied into a graph's, or was cut out of a batch into one buffer."""
    cache = prefill(model, [40, 17])
    if is_cut:
        cache = cache.cut([40, 17])[0]
    StaticKVCache.like(cache).copy_(cache)
    cache.cut(cache.lengths.tolist())
    gone = [weakref.ref(tensor.untyped_storage()) for layer in planes(cache) for tensor in layer.values()]
    expected = {name: tensor.clone() for name, tensor in cache.named_tensors()}
    del expected["lengths"]
    cache.drop_refinements()
    gc.collect()
    assert gone
    assert all(storage() is None for storage in gone)
    for name, tensor in cache.named_tensors():
        assert name == "lengths" or torch.equal(tensor, expected[name])
