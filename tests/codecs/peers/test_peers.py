"""Contract of all comparison codecs: presets, bytes, scores, extreme inputs and caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esm_turbo import KVCalibrator, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.codecs import CODECS, DataFreeCodec, codec_class, codec_without_calibration
from esm_turbo.codecs.peers.grouped import GroupedCodec
from esm_turbo.config import COMPARISON_PRESETS, PRESETS, PRODUCT_PRESETS, Geometry, TurboConfig
from tests.helpers.peer_codecs import HEAD_DIMS, decoded, make_codec, normal, relative_mse, stored_scores

MakeModel = Callable[..., TurboEsmForMaskedLM]
RandomProteins = Callable[..., tuple[Tensor, Tensor]]

DATA_FREE = [name for name, config in COMPARISON_PRESETS.items() if issubclass(codec_class(config), DataFreeCodec)]
CALIBRATED = sorted(set(COMPARISON_PRESETS) - set(DATA_FREE))
GROUPED = [name for name in COMPARISON_PRESETS if issubclass(codec_class(COMPARISON_PRESETS[name]), GroupedCodec)]
APPENDABLE = [name for name in COMPARISON_PRESETS if name not in GROUPED]
"""Presets whose caches can be appended to."""


def test_presets_are_products_and_comparisons():
    assert PRESETS == PRODUCT_PRESETS | COMPARISON_PRESETS
    assert not PRODUCT_PRESETS.keys() & COMPARISON_PRESETS.keys()
    assert set(PRODUCT_PRESETS) == {"exact", "paper", "turbo4", "turbo3", "turbo2", "turbo1"}
    assert {config.codec for config in PRESETS.values()} == set(CODECS)


def test_calibrating_fits_the_products_only(tiny_esm, random_proteins):
    calibrator = KVCalibrator(tiny_esm(head_dim=16, heads=2, layers=1), sample_size=64)
    calibration = calibrator.partial_fit(random_proteins([80, 80])[0]).finalize()
    assert set(calibration._codecs) == set(PRODUCT_PRESETS.values())
    lazily = calibration.codec("turboquant3")
    assert calibration.codec("turboquant3") is lazily
    assert len(calibration._codecs) == len(PRODUCT_PRESETS) + 1


@pytest.mark.parametrize("preset", DATA_FREE)
def test_no_calibration_is_needed(tiny_model: MakeModel, random_proteins: RandomProteins, preset: str) -> None:
    ids, mask = random_proteins([12, 7])
    without, fitted = tiny_model(), tiny_model(calibrated=True)
    for model in (without, fitted):
        model.set_turbo(calibration=model.esm.calibration, preset=preset)
    with torch.no_grad():
        caches = [model(ids, mask, use_cache=True).past_key_values for model in (without, fitted)]
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert mine.packed.keys() == theirs.packed.keys()
        assert all(torch.equal(mine.packed[name], theirs.packed[name]) for name in mine.packed)
    assert without.esm.codec(TurboConfig.from_preset(preset)) is caches[0].codec


@pytest.mark.parametrize("preset", CALIBRATED)
def test_a_calibration_is_needed(tiny_model: MakeModel, preset: str) -> None:
    model = tiny_model()
    model.set_turbo(preset=preset)
    assert codec_without_calibration(TurboConfig.from_preset(preset), Geometry(2, 4, 16)) is None
    with pytest.raises(ValueError, match=f"preset '{preset}' needs a calibration"), torch.no_grad():
        model(torch.tensor([[0, 5, 6]]), use_cache=True)


BYTES = {
    # preset: bytes of one token and head, at head sizes 24 and 64; (key, value)
    "turboquant4": [(12 + 2, 12 + 2), (32 + 2, 32 + 2)],
    "turboquant3": [(9 + 2, 9 + 2), (24 + 2, 24 + 2)],
    "turboquant2": [(6 + 2, 6 + 2), (16 + 2, 16 + 2)],
    "turboquant_prod4": [(9 + 3 + 4, 12 + 2), (24 + 8 + 4, 32 + 2)],
    "turboquant_prod3": [(6 + 3 + 4, 9 + 2), (16 + 8 + 4, 24 + 2)],
    "tq35": [(8 * 4 // 8 + 16 * 3 // 8 + 8,) * 2, (32 * 4 // 8 + 32 * 3 // 8 + 8,) * 2],
    "tq25": [(8 * 3 // 8 + 16 * 2 // 8 + 8,) * 2, (32 * 3 // 8 + 32 * 2 // 8 + 8,) * 2],
    "polarquant4": [(12 + 2 + 1 + 2, 12 + 2), (32 + 2 + 2 + 2, 32 + 2)],
    "polarquant3": [(9 + 2 + 1 + 2, 9 + 2), (24 + 2 + 2 + 2, 24 + 2)],
    "qjl": [(6 + 2, 6 + 4), (16 + 2, 16 + 8)],
    "qjl_outliers": [(1 + 6 + 2 + 6 + 2, 6 + 4), (1 + 16 + 2 + 16 + 2, 16 + 8)],
    "spectral": [(4 + 4 + 2, 12 + 2), (8 + 8 + 2, 32 + 2)],
    "spectral8": [(4 + 8 + 2, 24 + 2), (8 + 16 + 2, 64 + 2)],
    # Of isotropic keys, the largest 24 of 32 pairs hold 0.75 (1 - log 0.75) = 96.6 % of the energy, and 20 hold 92 %.
    "spectral_layers": [(12 + 12 + 2, 12 + 2), (24 + 24 + 2, 32 + 2)],
    "fp8": [(24, 24), (64, 64)],
    "int8": [(24 + 2, 24 + 2), (64 + 2, 64 + 2)],
    "int4": [(12 + 2, 12 + 2), (32 + 2, 32 + 2)],
    # The place in the tail is of both.
    "kivi4": [(12 + 2, 12 + 4), (32 + 2, 32 + 8)],
    "kivi2": [(6 + 2, 6 + 4), (16 + 2, 16 + 8)],
}
ROWS = {
    # codec: bytes of one row and head, given tokens and head size: two groups or three, and KIVI's tail.
    "kivi": lambda tokens, dim: tokens // 32 * dim * 4 + (tokens % 32 + 32) * dim * 2,
    "qjl_outliers": lambda tokens, dim: -(-tokens // 32) * (dim // 16),
}


@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("preset", COMPARISON_PRESETS)
def test_bytes_counted_by_hand(preset: str, head_dim: int) -> None:
    tokens, heads = 70, 2
    codec = make_codec(preset, head_dim, heads=heads)
    x = normal(1, heads, tokens, head_dim)
    packed = codec.encode(0, x, x)
    sizes = {"key": 0, "value": 0, "row": 0}
    for name, tensor in packed.items():
        kind = "key" if name.startswith("tail") else name.split("_")[0].removesuffix("s")
        sizes[kind if tensor.shape[2] == tokens else "row"] += tensor.nbytes
    key, value = BYTES[preset][HEAD_DIMS[1::2].index(head_dim)]
    row = ROWS.get(preset.rstrip("24"), lambda *_: 0)(tokens, head_dim)
    assert sizes == {"key": tokens * heads * key, "value": tokens * heads * value, "row": heads * row}


def test_cache_counts_all_that_is_stored(tiny_model: MakeModel, random_proteins: RandomProteins) -> None:
    """Four heads of 16, two layers: codes, norms, group bytes and rows, and one byte per token for its id."""
    ids, _ = random_proteins([64])
    expected = {
        "turboquant3": 64 * (6 + 2) * 2,
        # Codes, then two groups, 32 values of a tail and one unused key.
        "kivi2": 64 * ((4 + 2) + (4 + 4)) + 2 * 16 * 4 + (32 + 1) * 16 * 2,
        "qjl_outliers": 64 * ((1 + 4 + 2 + 4 + 2) + (4 + 4)) + 2 * 1,
    }
    for preset, head_bytes in expected.items():
        model = tiny_model(preset=preset)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        # In the first of the two layers, QJL's keys have twice as many signs and their outliers half as many.
        more = 64 * 2 if preset == "qjl_outliers" else 0
        assert cache.nbytes == 4 * (2 * head_bytes + more) + 64 + 8
        assert cache.bits_per_element == pytest.approx(8 * cache.nbytes / (2 * 2 * 4 * 16 * 64))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("preset", COMPARISON_PRESETS)
def test_scores_and_outputs_are_those_of_decoded_keys_and_values(preset: str, head_dim: int) -> None:
    codec = make_codec(preset, head_dim)
    keys, values, query = (3 * normal(2, 2, n, head_dim, seed=n) for n in (40, 40, 5))
    packed = codec.encode(0, keys, values)
    read_keys, read_values = codec.decode(0, packed)
    scores = stored_scores(codec, query, packed)
    torch.testing.assert_close(scores, query @ read_keys.mT, rtol=1e-4, atol=1e-3)
    weights = torch.softmax(scores, dim=-1)
    output = codec.unmap_output(0, weights @ codec.unpack(0, "value", packed))
    torch.testing.assert_close(output, weights @ read_values, rtol=1e-4, atol=1e-4)
    assert relative_mse(values, read_values) < 0.25
    assert relative_mse(keys, read_keys) < 0.6


EXTREMES = {
    "zero": lambda x: torch.zeros_like(x),
    "constant": lambda x: torch.full_like(x, 3.7),
    "one token": lambda x: x[:, :, :1],
    "huge": lambda x: x * 1e36,
    "large": lambda x: x * 1e9,
    "tiny": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-44,
    "one outlier": lambda x: x * torch.where(torch.arange(x.shape[-1]) == 3, 1e30, 1.0),
}


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("preset", COMPARISON_PRESETS)
def test_extreme_inputs_stay_finite(preset: str, kind: str) -> None:
    for head_dim in (24, 64):
        x = EXTREMES[kind](normal(1, 2, 40, head_dim))
        keys, values = decoded(make_codec(preset, head_dim), x)
        assert keys.shape == values.shape == x.shape
        assert bool(torch.isfinite(keys).all() and torch.isfinite(values).all())
        if kind == "zero":
            assert not keys.any() and not values.any()


@pytest.mark.parametrize("kind", ["large", "tiny"])
@pytest.mark.parametrize("preset", sorted(set(APPENDABLE) - {"fp8"}))
def test_codecs_with_scales_per_token_are_scale_invariant(preset: str, kind: str) -> None:
    """1e9 and 1e-30 lose no more than 1 does; fp8's scale is the layer's."""
    x = normal(1, 2, 40, 64)
    codec = make_codec(preset, 64)
    plain, scaled = decoded(codec, x)[0], decoded(codec, EXTREMES[kind](x))[0]
    assert relative_mse(EXTREMES[kind](x).double(), scaled.double()) == pytest.approx(relative_mse(x, plain), rel=0.1)


@pytest.mark.parametrize("preset", COMPARISON_PRESETS)
def test_fit_is_deterministic(preset: str) -> None:
    first, second = (make_codec(preset, 24).state for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.dtype == torch.float32 and len(tensor) == 1 for tensor in first.values())
    random = {"turboquant", "turboquant_prod", "hybrid", "polarquant", "qjl", "qjl_outliers"}
    other = make_codec(replace(PRESETS[preset], seed=1), 24).state
    differs = any(not torch.equal(first[name], other[name]) for name in first)
    assert differs == (PRESETS[preset].codec in random)


@pytest.mark.parametrize("preset", sorted(set(COMPARISON_PRESETS) - {"fp8"}))
def test_head_sizes_that_do_not_fill_bytes(preset: str) -> None:
    for head_dim in (4, 20):
        with pytest.raises(ValueError, match=f"`head_dim` must be a multiple of 8, got {head_dim}"):
            make_codec(preset, head_dim)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [("turboquant", 7), ("turboquant_prod", 1), ("hybrid", 2), ("hybrid", 5), ("polarquant", 1), ("spectral", 2)],
)
def test_unsupported_bits_are_refused(codec: str, bits: int) -> None:
    with pytest.raises(ValueError, match=rf"`bits` of codec '{codec}' must be one of \[.*\], got {bits}"):
        make_codec(TurboConfig(codec=codec, bits=bits), 64)


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("preset", COMPARISON_PRESETS)
def test_caches_are_written_read_saved_and_loaded(
    tiny_model: MakeModel, random_proteins: RandomProteins, tmp_path, preset: str, head_dim: int
) -> None:
    model = tiny_model(preset=preset, head_dim=head_dim)
    ids, mask = random_proteins([40, 13])
    new = random_proteins([3, 3], seed=1, cls=False)[0]
    with torch.no_grad():
        cache = model(ids, mask, use_cache=True).past_key_values
        expected = model(new, past_key_values=cache).logits
        assert bool(torch.isfinite(expected).all())
        slow = tiny_model(preset=preset, head_dim=head_dim, backend="reference")
        torch.testing.assert_close(slow(new, past_key_values=cache).logits, expected, rtol=1e-3, atol=1e-3)
        cache.save(tmp_path / "cache.safetensors")
        loaded = TurboKVCache.load(tmp_path / "cache.safetensors", model=model)
        assert loaded.config.name == preset
        assert loaded.nbytes == cache.nbytes
        assert torch.equal(model(new, past_key_values=loaded).logits, expected)
        second = model(new[1:], past_key_values=cache.select([1])).logits
        torch.testing.assert_close(second, expected[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", APPENDABLE)
def test_appended_tokens_are_stored_as_prefilled_ones(
    tiny_model: MakeModel, random_proteins: RandomProteins, preset: str
) -> None:
    """The first layer's keys and values do not depend on the context."""
    model = tiny_model(preset=preset)
    ids, _ = random_proteins([20])
    with torch.no_grad():
        whole = model(ids, use_cache=True).past_key_values
        cache = model(ids[:, :15], use_cache=True).past_key_values
        model(ids[:, 15:], past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [20]
    codec = whole.codec
    for kind in ("key", "value"):
        a, b = (codec.unpack(0, kind, c.layers[0].packed) for c in (whole, cache))
        # Matrix products of other shapes round differently, and a code may lie on the border.
        assert float((a - b).abs().mean()) < 0.01 * float(a.abs().mean())


@pytest.mark.parametrize("preset", COMPARISON_PRESETS)
def test_special_tokens_may_be_protected(tiny_model: MakeModel, random_proteins: RandomProteins, preset: str) -> None:
    config = replace(PRESETS[preset], protect_special_tokens=True)
    ids, mask = random_proteins([20, 9], eos=True)
    outputs = []
    with torch.no_grad():
        for backend in ("torch", "reference"):
            model = tiny_model(preset=config, backend=backend)
            cache = model(ids, mask, use_cache=True).past_key_values
            outputs.append(model(ids[:, 1:3], past_key_values=cache).logits)
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
